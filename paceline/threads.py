"""Chooses torch's number of threads: one if the operations of a step are too few for several."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

# On two idle cores two threads were hardly faster than one for steps of 42 and 89 million operations (net2, digits),
# and faster from 150 million on (net3). On busy cores they were slower for all three. See benchmarks/threads.py.
_WORTH_SHARING = 115e6  # operations of a step
_PER_ELEMENT = 10  # operations of a matrix product that take as long as one element of any other result


def _convolution(weight: Tensor, small: Tensor) -> int:
    """The operations of a convolution; ``small`` is its output, or the input of a transposed one."""
    return 2 * weight.numel() * (small.numel() // weight.shape[0])


def _recurrent(steps: Tensor, *weights: Tensor) -> int:
    """The operations of a recurrent layer on steps of a batch of sequences."""
    return 2 * sum(weight.numel() for weight in weights) * math.prod(steps.shape[:2])


_aten = torch.ops.aten
_PRODUCTS: Mapping[object, Callable[[Sequence[Any], Tensor], int]] = {
    _aten.mm: lambda given, out: 2 * out.numel() * given[0].shape[-1],
    _aten.bmm: lambda given, out: 2 * out.numel() * given[0].shape[-1],
    _aten.addmm: lambda given, out: 2 * out.numel() * given[1].shape[-1],
    _aten.baddbmm: lambda given, out: 2 * out.numel() * given[1].shape[-1],
    _aten.convolution: lambda given, out: _convolution(given[1], given[0] if given[6] else out),
    _aten.convolution_backward: lambda given, _: (
        sum(given[10][:2]) * _convolution(given[2], given[1] if given[7] else given[0])
    ),
    _aten.mkldnn_rnn_layer: lambda given, _: _recurrent(*given[:3]),
    _aten.mkldnn_rnn_layer_backward: lambda given, _: 2 * _recurrent(*given[:3]),
    _aten._scaled_dot_product_flash_attention_for_cpu: lambda given, _: 4 * given[0].numel() * given[1].shape[-2],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda given, _: (
        10 * given[1].numel() * given[2].shape[-2]
    ),
}


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that torch makes inside the block, of forward and backward passes.

    >>> left, right = torch.ones(2, 3), torch.ones(3, 4)
    >>> with OperationCounter() as counter:
    ...     _ = left @ right
    >>> counter.total
    48
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total: int = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else what is compiled and runs here first would not be compiled, now and later

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        results = made if isinstance(made, tuple | list) else (made,)
        out = next((each for each in results if isinstance(each, Tensor) and not each.is_nested), None)
        if out is not None and not getattr(func, "is_view", False):
            product = _PRODUCTS.get(getattr(func, "overloadpacket", None))
            self.total += _PER_ELEMENT * out.numel() if product is None else product(args, out)
        return made


def is_small(operations: int) -> bool:
    """Whether a step of so many operations is faster in one thread."""
    return operations < _WORTH_SHARING


def step_operations(model: nn.Module, example: Tensor, batch_size: int) -> int:
    """The operations of a step, from those of batches of one and of two examples."""
    was_training = model.training
    found = []
    try:
        for count in (1, 2):
            with OperationCounter() as counter:
                made = model.eval()(torch.stack([example] * count)).sum()
                torch.autograd.grad(made, [*model.parameters()], allow_unused=True)
            found.append(int(counter.total))
    finally:
        model.train(was_training)
    one, two = found
    return one + (batch_size - 1) * (two - one)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread inside the block, and as many as before after it.

    Results then do not depend on the machine's number of cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
