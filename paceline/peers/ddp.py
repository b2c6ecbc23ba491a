"""A module wrapper with the interface of PyTorch's DistributedDataParallel, on our reducer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from paceline.codecs import Codec, read_codec
from paceline.launch.environment import read_rank_and_size
from paceline.peers.connect import begin_exchange, device_of, find_peers
from paceline.peers.exchange import BackwardPass
from paceline.policies import AllReduce


class DistributedDataParallel(nn.Module):
    """Wrap ``module`` so that ``backward()`` averages its gradients over all workers (Li et al., VLDB 2020).

    It is for loops that keep their own ``optimizer.step()``. Without a launcher it does nothing. It differs from
    PyTorch's in two ways: parameters that a step does not use need no option, and ``state_dict`` has the names of
    ``module`` itself, without a prefix.

    Args:
        process_group: any ``torch.distributed`` group; the default one, made from torchrun's variables if need be.
        bucket_cap_mb: gradients are reduced in buckets of about this size.
        broadcast_buffers: copy worker 0's buffers to all before every training pass.
        codec: how gradients become fewer bytes, such as ``"top-k(density=0.001)"``.
        scaler: the ``GradScaler`` that scales the loss; a codec that remembers something must know its scale.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_cap_mb: float = 25.0,
        *,
        broadcast_buffers: bool = True,
        process_group: Any = None,
        codec: str | Codec | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        policy = AllReduce(bucket_cap_mb=bucket_cap_mb)
        peers = find_peers(device_of(module), policy, group=process_group, rank_and_size=read_rank_and_size())
        self._exchange = begin_exchange(module, policy, peers, read_codec(codec))
        if self._exchange.coding is not None:
            self._exchange.coding.scaler = scaler
        self._broadcast_buffers = broadcast_buffers
        self._synchronising = True
        self._passes = 0
        self.register_load_state_dict_pre_hook(self._add_prefix)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without exchanging them; the next pass outside the block exchanges the sums."""
        before, self._synchronising = self._synchronising, False
        try:
            yield
        finally:
            self._synchronising = before

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():  # a pass without gradients, such as an evaluation, exchanges nothing
            if self._synchronising:
                size = self._exchange.world_size
                self._exchange.begin(BackwardPass(examples=1, total=size, tag=self._passes))
                self._passes += 1
                if self._broadcast_buffers and self.training:
                    self._exchange.follow_buffers()
            else:
                self._exchange.release()
        return self.module(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def codec_state(self) -> dict[str, Any]:
        """What the codec remembers on this worker; save it for every worker, with its rank."""
        coding = self._exchange.coding
        return {} if coding is None else coding.state_dict()

    def load_codec_state(self, state: dict[str, Any]) -> None:
        """Go back to what ``codec_state`` gave on this worker."""
        if self._exchange.coding is not None:
            self._exchange.coding.load_state_dict(state)

    @staticmethod
    def _add_prefix(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        """Add the prefix that ``state_dict`` leaves out, before loading."""
        for name in [name for name in state if name.startswith(prefix)]:
            state[f"{prefix}module.{name.removeprefix(prefix)}"] = state.pop(name)
