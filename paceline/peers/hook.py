"""Codecs for those who stay with PyTorch's own DistributedDataParallel: a communication hook."""

# No "from __future__ import annotations": PyTorch compares those of the hook.

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from paceline.codecs import Codec, Parts, read_codec
from paceline.collectives.calls import Calls
from paceline.errors import UsageError
from paceline.peers.coding import CodedSum, Coding
from paceline.peers.group import Peers


class CommHookState:
    """What a codec remembers under PyTorch's DistributedDataParallel; made by ``comm_hook``.

    PyTorch plans its buckets anew after the first step; what was remembered of buckets that are no more is lost then.
    """

    def __init__(self, codec: Codec, group: Any) -> None:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        # A group of its own: DDP may use its own one at the same time.
        own = dist.new_group(ranks)
        self._peers = Peers(own, dist.get_rank(own), len(ranks), torch.device("cpu"))
        self._coding = Coding(codec, self._peers)
        self._calls = Calls("codec", at_end=lambda: None)

    @property
    def num_bytes(self) -> int:
        """The bytes that this worker has sent so far."""
        return self._peers.traffic.num_bytes

    def state_dict(self) -> dict[str, Any]:
        """All that is remembered on this worker; save it for every worker."""
        return self._coding.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to what ``state_dict`` gave on this worker, before the first step."""
        self._coding.load_state_dict(state)

    def average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Average a bucket over all workers, while backward goes on."""
        gradients = bucket.gradients()
        name = ";".join(",".join(map(str, gradient.shape)) for gradient in gradients)
        coded = self._coding.sum_of(f"{bucket.index()} {name}", Parts.of(gradients))
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        self._calls.submit(functools.partial(self._sum, coded, bucket.buffer(), done))
        return done

    def _sum(self, coded: CodedSum, flat: Tensor, done: torch.futures.Future[Tensor]) -> None:
        try:
            with torch.no_grad(), self._peers.explain("averaging gradients"):
                coded.start(flat.div_(self._peers.size), self._peers).wait()
            coded.settle()
        except Exception as error:
            done.set_exception(error)  # type: ignore[arg-type]  # as its documentation has it
            raise
        done.set_result(flat)


def codec_hook(state: CommHookState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The hook; ``comm_hook`` gives it with its state."""
    return state.average(bucket)


def comm_hook(codec: str | Codec, group: Any = None) -> tuple[CommHookState, Any]:
    """State and hook for PyTorch's ``DistributedDataParallel``; all workers must call it together.

    ``ddp.register_comm_hook(*paceline.comm_hook("top-k(density=0.001)"))``

    Keep the state to save what the codec remembers: ``state.state_dict()``, on every worker. ``group`` is the process
    group of the wrapper, if it has one.
    """
    chosen = read_codec(codec)
    if chosen is None:
        raise UsageError(f"a hook wants a codec, got {codec!r}; without one register no hook")
    return CommHookState(chosen, group), codec_hook
