"""Times codecs on one core: encode and decode the gradients of a model, and reduce them in a group of one rank.

``reduce_ms`` is all that a codec costs a step but for the link. Torch's own communication hooks do the same work on the
same gradients, in turns with ours. A GB is of float32 gradients; ``ratio`` is their bytes over those of the packet.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from paceline.bench.measuring import Row
from paceline.bench.workloads import WORKLOADS
from paceline.codecs import Parts, parse_codec

CODECS = (
    "cast(to=bf16)",
    "cast(to=fp16)",
    "cast(to=fp8)",
    "qsgd",
    "qsgd(levels=127)",
    "qsgd(levels=15, norm=2, form=elias)",
    "sign",
    "top-k",
    "top-k(momentum=0.9)",
    "top-k(sampled=0.01)",
    "sparse-ternary(density=0.03)",
    "threshold(tau=0.001, adaptive=0.001)",
    "power-sgd(rank=2)",
)
_WARM_UPS = 5  # torch's PowerSGD hook begins with its third call
_SWEPT = 64 << 20  # writing this much evicts everything else from the cache

Way = Callable[[], object]


def measure(models: Sequence[str], rounds: int) -> list[Row]:
    """Measure all codecs on the gradients of every model; called on the only rank of the default group."""
    gloo = dist.new_group(backend="gloo")
    return [row for name in models for row in compare(name, gloo, rounds)]


def compare(name: str, gloo: dist.ProcessGroup, rounds: int) -> list[Row]:
    """Measure all codecs and hooks on the gradients of one model."""
    model = with_gradients(name)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    coded = {text: Coded(text, Parts.of(gradients), flat, Alone(gloo)) for text in CODECS}
    hooks = {way: Hooked(model, flat, hook) for way, hook in torch_hooks(gloo).items()}
    ways: dict[tuple[str, str], Way] = {(way, "reduce"): hooked.reduce for way, hooked in hooks.items()}
    for text, way in coded.items():
        ways |= {(text, "encode"): way.encode, (text, "decode"): way.decode, (text, "reduce"): way.reduce}
    seconds = take_turns(ways, rounds)
    rows = [row_of(name, flat, text, way.packet.numel(), seconds) for text, way in coded.items()]
    return rows + [row_of(name, flat, way, None, seconds) for way in hooks]


def row_of(model: str, flat: Tensor, way: str, size: int | None, seconds: dict[tuple[str, str], float]) -> Row:
    def rate(part: str) -> float | None:
        return flat.nbytes / seconds[way, part] / 1e9 if (way, part) in seconds else None

    return {
        "model": model,
        "megabytes": flat.nbytes / 1e6,
        "way": way,
        "bytes": size,
        "ratio": flat.nbytes / size if size else None,
        "encode_gb_s": rate("encode"),
        "decode_gb_s": rate("decode"),
        "reduce_ms": seconds[way, "reduce"] * 1e3,
    }


def with_gradients(name: str) -> nn.Module:
    """A model with the gradients of one batch."""
    workload = WORKLOADS[name]
    model = workload.model()
    workload.loss(model, workload.examples(workload.batch, seed=0)).backward()  # type: ignore[no-untyped-call]
    return model


class Done:
    """An exchange that has ended."""

    def __init__(self, packets: Sequence[Tensor] = ()) -> None:
        self._packets = packets

    def wait(self) -> Sequence[Tensor]:
        return self._packets


class Alone:
    """The only rank: sums as torch's hooks make them, and nothing to gather."""

    rank, size = 0, 1

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def all_reduce(self, tensor: Tensor) -> Done:
        dist.all_reduce(tensor, group=self._group)
        return Done()

    def gather_packets(self, packet: Tensor) -> Done:
        return Done([packet])


class Coded:
    """One of our codecs with its state; a reduction has a state of its own, as a worker has."""

    def __init__(self, text: str, parts: Parts, flat: Tensor, group: Alone) -> None:
        self._flat, self._work, self._group, self._step = flat, flat.clone(), group, 0
        self._one, self._other = (parse_codec(text).new_state(parts, seed=0) for _ in range(2))
        self.packet = self._one.encode(flat, step=0)

    def encode(self) -> None:
        self._step += 1
        self.packet = self._one.encode(self._flat, step=self._step)

    def decode(self) -> None:
        self._one.decode(self.packet, self._work)

    def reduce(self) -> None:
        self._step += 1
        self._other.reduce(self._work.copy_(self._flat), self._group, step=self._step).wait()


class Hooked:
    """One of torch's hooks, which is given what DDP would give it."""

    def __init__(self, model: nn.Module, flat: Tensor, hook: Callable[[Hooked], torch.futures.Future[Tensor]]) -> None:
        self._flat, self._work, self._hook = flat, flat.clone(), hook
        self._parameters = list(model.parameters())

    def reduce(self) -> None:
        self._work.copy_(self._flat)
        self._hook(self).wait()

    def buffer(self) -> Tensor:
        return self._work

    def gradients(self) -> list[Tensor]:
        sizes = [parameter.numel() for parameter in self._parameters]
        pieces = torch.split_with_sizes(self._work, sizes)
        return [piece.view(parameter.shape) for piece, parameter in zip(pieces, self._parameters, strict=True)]

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def torch_hooks(group: dist.ProcessGroup) -> dict[str, Callable[[Hooked], torch.futures.Future[Tensor]]]:
    """The hooks of torch that do what one of our codecs does."""
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
    return {
        "torch fp16_compress_hook": lambda bucket: default_hooks.fp16_compress_hook(group, bucket),
        "torch powerSGD_hook": lambda bucket: powerSGD_hook.powerSGD_hook(state, bucket),
    }


def take_turns(ways: dict[tuple[str, str], Way], rounds: int) -> dict[tuple[str, str], float]:
    """The median seconds of every way; before each call other memory is written, as a step's computation does."""
    sweep = torch.zeros(_SWEPT // 4)
    times: dict[tuple[str, str], list[float]] = {name: [] for name in ways}
    for number in range(_WARM_UPS + rounds):
        for name, way in ways.items():
            sweep.add_(1.0)
            start = time.perf_counter()
            way()
            if number >= _WARM_UPS:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}
