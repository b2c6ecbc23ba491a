"""Which server holds which parameters, where there are several."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import nn

from paceline.errors import UsageError
from paceline.store.layout import ModelLayouts


def deal(sizes: Sequence[int], servers: int) -> list[range]:
    """Cut a row of tensors into as many stretches as there are servers, of about equal sizes and none empty.

    >>> deal([4, 1, 1, 1, 5], servers=3)
    [range(0, 1), range(1, 4), range(4, 5)]
    """
    count = len(sizes)
    if count < servers:
        raise UsageError(
            f"a model of {count} trained tensors cannot be dealt out to {servers} servers, since each holds whole "
            f"tensors; use --servers {max(1, count)} or fewer"
        )
    ends = [0, *accumulate(sizes)]
    cuts = [0]
    for server in range(1, servers):
        wanted = ends[-1] * server / servers
        possible = range(cuts[-1] + 1, count - servers + server + 1)  # the others need one each
        cuts.append(min(possible, key=lambda cut: abs(ends[cut] - wanted)))
    return [range(start, stop) for start, stop in zip(cuts, [*cuts[1:], count], strict=True)]


def check_dealt(model: nn.Module, servers: int) -> None:
    """Raise if the model has too few trained tensors for so many servers."""
    if servers > 1:
        layouts_of(model, servers)


def layouts_of(model: nn.Module, servers: int, *, with_reads: bool = False) -> list[ModelLayouts]:
    """What each of the servers holds; the first has, beside its share, the buffers and what is not trained."""
    if servers == 1:
        return [ModelLayouts(model, with_reads=with_reads)]
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    parts = [{named[index][0] for index in part} for part in deal([each.nbytes for _, each in named], servers)]
    others = set().union(*parts[1:])
    first = {name for name, _ in model.named_parameters()} - others
    rest = [ModelLayouts(model, part, with_buffers=False, with_reads=with_reads) for part in parts[1:]]
    return [ModelLayouts(model, first, with_reads=with_reads), *rest]


def starts_of(layouts: Sequence[ModelLayouts]) -> list[int]:
    """The place of each server's first trained parameter among all of them, and behind them their number."""
    return [0, *accumulate(len(each.trained) for each in layouts)]


def bits_of(used: bytes, start: int, stop: int) -> bytes:
    """The bits from ``start`` up to ``stop``, of one bit per trained parameter.

    >>> bits_of(b"\\xf0\\x0f", 4, 14).hex()
    'ff00'
    """
    bits = int.from_bytes(used, "little") >> start & ((1 << stop - start) - 1)
    return bits.to_bytes(-(-(stop - start) // 8), "little")
