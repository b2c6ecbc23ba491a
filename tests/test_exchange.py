"""What workers agree on beside gradients: the model at the start, its buffers, means, a checkpoint's state."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from careful_group import CarefulGroup
from conftest import World
from joined_batch import backward, channels_last, copy_for, peers_of
from same_bits import assert_same, difference
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.peers.connect import begin_exchange
from paceline.peers.exchange import BackwardPass, Exchange
from paceline.policies import AllReduce


def exchange_of(model: nn.Module, group: Any) -> Exchange:
    return begin_exchange(model, AllReduce(), peers_of(group))


# The model at the start ---------------------------------------------------------------------------------------


def linears(*sizes: int, **options: Any) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(before, after, **options) for before, after in pairwise(sizes)))


def with_first_frozen() -> nn.Module:
    model = linears(2, 3, 2)
    model[0].requires_grad_(False)
    return model


def with_buffer() -> nn.Module:
    model = linears(2, 3, 2)
    model.register_buffer("table", torch.zeros(4))
    return model


def swapped() -> nn.Module:
    """The same parameters in another order."""
    model = nn.Module()
    model.bias, model.weight = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, 2))
    return model


OTHERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], str]] = {
    "shape": (lambda: linears(2, 3, 2), lambda: linears(2, 4, 2), r"0\.weight \(4, 2\).*0\.weight \(3, 2\)"),
    "dtype": (lambda: linears(2, 2), lambda: linears(2, 2).double(), r"0\.weight .*float64.*float32"),
    "name": (lambda: linears(2, 2), lambda: nn.Linear(2, 2), r"is weight .*0\.weight"),
    "order": (lambda: nn.Linear(2, 2), swapped, r"is bias .*weight"),
    "fewer": (lambda: linears(2, 2, 2), lambda: linears(2, 2), r"has 2 tensors, and worker 0 has 4"),
    "more": (lambda: linears(2, 2), lambda: linears(2, 2, 2), r"has 4 tensors, and worker 0 has 2"),
    "frozen": (lambda: linears(2, 3, 2), with_first_frozen, r"0\.weight .*\(frozen\)"),
    "buffer": (lambda: linears(2, 3, 2), with_buffer, r"has 5 tensors, and worker 0 has 4"),
}


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("what", OTHERS)
def test_another_model_on_one_worker_is_told_to_all(world: World, what: str, odd: int) -> None:
    usual, other, _ = OTHERS[what]

    def work(group: Any) -> str:
        model = other() if group.rank() == odd else usual()
        with pytest.raises(UsageError, match="has another model than worker 0") as caught:
            exchange_of(model, group)
        return str(caught.value)

    messages = world(3, work)
    assert len(set(messages)) == 1
    assert messages[0].startswith(f"worker {odd or 1} ")


@pytest.mark.parametrize("what", OTHERS)
def test_the_first_difference_is_named(world: World, what: str) -> None:
    usual, other, words = OTHERS[what]

    def work(group: Any) -> None:
        with pytest.raises(UsageError, match=words):
            exchange_of(other() if group.rank() == 1 else usual(), group)

    world(2, work)


def test_another_memory_layout_on_one_worker_is_harmless(world: World) -> None:
    """Elements must not be mixed up: a reduction adds memory to memory."""
    template = nn.Conv2d(3, 2, 3)

    def work(group: Any) -> Tensor:
        model = copy_for(group, template)
        exchange = exchange_of(channels_last(model) if group.rank() == 1 else model, group)
        exchange.close()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    expected = torch.cat([parameter.detach().flatten() for parameter in template.parameters()])
    for found in world(2, work):
        assert torch.equal(found, expected)


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "scalar": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(0, 3),
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).t(),
    "with gaps": lambda: torch.arange(24.0).reshape(4, 6)[:, ::2],
    "float16": lambda: torch.arange(4.0).half(),
    "bfloat16": lambda: torch.arange(4.0).bfloat16(),
    "complex": lambda: torch.arange(4.0) * (1 + 2j),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_of_any_layout_come_from_worker_0_and_are_averaged(world: World, layout: str) -> None:
    wanted = LAYOUTS[layout]()

    def work(group: Any) -> None:
        model = nn.Module()
        model.weight = nn.Parameter(LAYOUTS[layout]())
        with torch.no_grad():
            model.weight.mul_(1 - group.rank())
        exchange = exchange_of(model, group)
        assert_same(model.weight.detach(), wanted)
        exchange.begin(BackwardPass(examples=1 + 2 * group.rank(), total=4))
        backward((model.weight * 4 * group.rank()).real.sum())
        exchange.finish()
        assert_same(model.weight.grad, torch.full_like(wanted, 3.0))

    world(2, work)


# Buffers ------------------------------------------------------------------------------------------------------

BUFFERS: dict[str, Callable[[], Tensor]] = {
    **LAYOUTS,
    "int64": lambda: torch.arange(5),
    "int16": lambda: torch.arange(5, dtype=torch.int16),
    "uint8": lambda: torch.arange(5, dtype=torch.uint8),
    "mask": lambda: torch.ones(4, 4, dtype=torch.bool).tril(),
}


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("kind", BUFFERS)
def test_buffers_follow_worker_0(world: World, kind: str, persistent: bool) -> None:
    wanted = BUFFERS[kind]()

    def work(group: Any) -> None:
        model = nn.Linear(2, 1)
        table = BUFFERS[kind]()
        model.register_buffer("table", table, persistent=persistent)
        if group.rank() == 1:
            table.zero_()
        exchange = exchange_of(model, group)
        assert_same(table, wanted)
        if group.rank() == 1:
            table.zero_()
        exchange.begin(BackwardPass(examples=1, total=2))
        backward(model(torch.ones(1, 2)).sum())
        exchange.finish()
        assert_same(table, wanted)

    world(2, work)


def test_a_buffer_that_repeats_its_memory_is_not_written_past_its_end(world: World) -> None:
    log: dict[int, Any] = {}

    def work(group: Any) -> Tensor:
        model = nn.Linear(2, 1)
        table = torch.tensor([2.0]).expand(1000)
        model.register_buffer("table", table)
        exchange = exchange_of(model, CarefulGroup(group, log))
        exchange.begin(BackwardPass(examples=1, total=2))
        backward(model(torch.ones(1, 2)).sum())
        exchange.finish()
        return table

    for table in world(2, work):
        assert_same(table, torch.full((1000,), 2.0))


def test_statistics_of_batch_norm_are_those_of_worker_0_between_steps(world: World) -> None:
    template = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    inputs = torch.randn(2, 5, 3) * torch.tensor([1.0, 9.0]).reshape(2, 1, 1)

    def work(group: Any) -> list[dict[str, Tensor]]:
        model = copy_for(group, template)
        exchange = exchange_of(model, group)
        found = []
        for _ in range(3):
            exchange.begin(BackwardPass(examples=1, total=2))
            loss = model(inputs[group.rank()]).sum()
            found.append({name: value.clone() for name, value in model.named_buffers()})
            backward(loss)
            exchange.finish()
            found.append({name: value.clone() for name, value in model.named_buffers()})
            exchange.release()
        return found

    first, second = world(2, work)
    for step in range(3):
        assert difference(first[2 * step], second[2 * step]) is not None  # else the next line shows nothing
        assert_same(second[2 * step + 1], first[2 * step + 1])
        assert_same(first[2 * step + 1], first[2 * step])
    assert first[-1]["1.num_batches_tracked"] == 3
    assert first[-1]["1.num_batches_tracked"].dtype == torch.int64


# Means and states ---------------------------------------------------------------------------------------------


MEANS: dict[str, tuple[Callable[[int], Any], Callable[[int], float], Any]] = {
    "numbers": (lambda rank: float(rank), lambda _: 1, 1.0),
    "weighted": (lambda rank: float(rank), lambda rank: rank, 5 / 3),
    "tensors": (lambda rank: torch.tensor([[1.0, rank]]), lambda rank: rank + 1, [[1.0, 4 / 3]]),
    "whole numbers": (lambda rank: 3 + (rank > 1), lambda _: 1, 10 / 3),
    "whole tensors": (lambda rank: torch.tensor([rank, 1 - (rank > 0)]), lambda _: 1, [1, 1 / 3]),
    "whole and part weights": (lambda rank: torch.tensor(4 * rank), lambda rank: 0.5 * (rank < 2), 2.0),
    "truth": (lambda rank: torch.tensor(rank == 0), lambda _: 1, 1 / 3),
    "float16, heavy": (lambda rank: torch.tensor(rank).half(), lambda _: 100_000, 1.0),
    "bfloat16, odd weights": (lambda rank: torch.tensor(64.0 * (rank > 0)).bfloat16(), lambda _: 257, 64 * 2 / 3),
    "float64": (lambda rank: torch.tensor(1 + rank * 1e-12, dtype=torch.float64), lambda _: 1, 1 + 1e-12),
    "no weight, no number": (lambda rank: math.nan if rank == 2 else 1.0, lambda rank: 2 - rank, 1.0),
}


@pytest.mark.parametrize("what", MEANS)
def test_means(world: World, what: str) -> None:
    value, weight, expected = MEANS[what]

    def work(group: Any) -> Tensor:
        exchange = exchange_of(nn.Linear(1, 1), group)
        given = torch.as_tensor(value(group.rank()))
        found = exchange.mean(given, weight(group.rank()))
        assert found.shape == given.shape
        return found

    wanted = torch.tensor(expected, dtype=torch.float64)
    for found in world(3, work):
        tolerance = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float64: 1e-15}.get(found.dtype, 1e-6)
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=0)


STATE = {
    "tensors": [torch.arange(3), torch.tensor(True), torch.empty(0, 2), torch.ones(2, 3).t(), torch.ones(1).half()],
    "others": {"none": None, "pair": (1, "a"), "big": 2**63 + 1, 5: math.inf, "text": "dash \u2013"},
}


def test_state_of_worker_0_is_shared(world: World) -> None:
    def work(group: Any) -> Any:
        exchange = exchange_of(nn.Linear(1, 1), group)
        return exchange.share(STATE if group.rank() == 0 else None), exchange.share(None), exchange.share([])

    for shared, none, empty in world(3, work):
        assert_same(shared, STATE)
        assert none is None
        assert empty == []


def test_the_largest_number_is_found(world: World) -> None:
    def work(group: Any) -> int:
        return exchange_of(nn.Linear(1, 1), group).largest(10 - group.rank())

    assert world(3, work) == [10, 10, 10]
