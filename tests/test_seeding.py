"""Seeds are stable and apart; captured streams go on as if nothing had happened."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.seeding import capture_streams, derive_seed, restore_streams, seed_streams

law = settings(deadline=None)
PARTS = st.lists(st.integers() | st.text(st.characters(exclude_categories=["Cs"])), max_size=4)


@pytest.mark.parametrize(
    ("parts", "seed"),
    [
        ((), 8238016292129134938),
        ((0,), 6148773199958884930),
        ((-1, "epoch", 2**70), 7631864918827625740),
        (("0",), 384157422120658919),
        (("\u00e9", ""), 7324856888191579119),
    ],
)
def test_seeds_never_change(parts: tuple[int | str, ...], seed: int) -> None:
    assert derive_seed(*parts) == seed


@law
@given(PARTS, PARTS)
def test_different_parts_give_different_seeds(left: list[int | str], right: list[int | str]) -> None:
    assert (derive_seed(*left) == derive_seed(*right)) == (left == right)


@law
@given(PARTS)
def test_seeds_have_63_bits(parts: list[int | str]) -> None:
    assert 0 <= derive_seed(*parts) < 2**63


def test_how_parts_are_divided_matters() -> None:
    assert len({derive_seed("ab", "c"), derive_seed("a", "bc"), derive_seed("abc"), derive_seed("s1:a", "bc")}) == 4


def test_numpy_numbers_count_as_numbers_and_fractions_do_not() -> None:
    number: Any = numpy.int64(7)
    fraction: Any = 7.0
    assert derive_seed(number) == derive_seed(7)
    with pytest.raises(TypeError):
        derive_seed(fraction)


def draw() -> list[float]:
    """One draw of each kind; an odd number of normals leaves the second of a pair in each cache."""
    return [
        torch.rand(()).item(),
        torch.randn(()).item(),
        random.random(),
        random.gauss(0, 1),
        numpy.random.random(),
        numpy.random.normal(),
    ]


@law
@given(st.integers(0, 2**63 - 1))
def test_the_same_seed_gives_the_same_draws(seed: int) -> None:
    seed_streams(seed)
    first = [draw(), draw()]
    seed_streams(seed)
    assert [draw(), draw()] == first
    seed_streams(seed ^ 1)
    assert not any(a == b for a, b in zip(draw(), first[0], strict=True))


def test_seeding_torch_directly_equals_manual_seed() -> None:
    seed_streams(123)
    direct = torch.randn(100)
    torch.manual_seed(123)
    assert torch.equal(direct, torch.randn(100))


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint does: tensors as they are, everything else as JSON."""
    rest = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
    return {**state, **json.loads(json.dumps(rest))}


@pytest.mark.parametrize("draws_before", [0, 1, 2, 3])
@pytest.mark.parametrize("keep", [dict, through_json])
def test_restored_streams_go_on_with_the_same_draws(draws_before: int, keep: Callable[..., dict[str, Any]]) -> None:
    seed_streams(5)
    for _ in range(draws_before):
        draw()
    state = keep(capture_streams())
    expected = [draw() for _ in range(400)]  # longer than any block that a generator makes at once
    seed_streams(6)
    draw()
    restore_streams(state)
    assert [draw() for _ in range(400)] == expected


def test_capturing_changes_nothing_and_is_not_changed_by_later_draws() -> None:
    seed_streams(5)
    plain = draw()
    seed_streams(5)
    state = capture_streams()
    assert draw() == plain
    draw()
    restore_streams(state)
    assert draw() == plain


def test_state_stays_on_the_cpu_whatever_the_default_device() -> None:
    with torch.device("meta"):
        state = capture_streams()
        restore_streams(state)
    assert {value.device.type for value in state.values() if isinstance(value, torch.Tensor)} == {"cpu"}


class FakeDevice:
    """Stands for the random streams of a device that the test machine lacks."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def note(self, name: str, result: Any = None) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, *arguments))
            return result

        return call


def test_cuda_streams_are_kept_when_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeDevice()
    for name, result in {
        "is_initialized": True,
        "is_available": True,
        "device_count": 1,
        "get_rng_state_all": ["first", "second"],
        "manual_seed_all": None,
        "set_rng_state": None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, cuda.note(name, result))
    seed_streams(7)
    restore_streams(capture_streams())
    assert ("manual_seed_all", 7) in cuda.calls
    assert [call for call in cuda.calls if call[0] == "set_rng_state"] == [("set_rng_state", "first", 0)]


def test_mps_streams_are_kept_when_there(monkeypatch: pytest.MonkeyPatch) -> None:
    mps = FakeDevice()
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    for name, result in {"manual_seed": None, "get_rng_state": "state", "set_rng_state": None}.items():
        monkeypatch.setattr(torch.mps, name, mps.note(name, result))
    seed_streams(7)
    restore_streams(capture_streams())
    assert mps.calls == [("manual_seed", 7), ("get_rng_state",), ("set_rng_state", "state")]


def test_streams_of_devices_that_are_gone_are_left_out() -> None:
    restore_streams({**capture_streams(), "cuda": [torch.zeros(16, dtype=torch.uint8)], "mps": torch.zeros(1)})
