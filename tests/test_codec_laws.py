"""The laws of codecs: what is random is right on average, nothing is lost, ranks agree, and a state can be saved."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_codecs import ALL, parts
from torch import Tensor

from paceline.codecs import QSGD, Parts, PowerSGD, TopK, parse_codec
from paceline.codecs.elias import most_bytes, read, write
from paceline.codecs.packet import Reader
from paceline.codecs.rice import most_bytes as most_gap_bytes
from paceline.codecs.rice import read as read_gaps
from paceline.codecs.rice import write as write_gaps
from paceline.codecs.rounding import key_of, uniform
from paceline.codecs.selection import about_largest, largest
from paceline.errors import UsageError

T = TypeVar("T")

SHAPES = ((12, 30), (7,), (6, 5, 3, 3))
MADE_OF = parts(*SHAPES)
WITH_FEEDBACK = [text for text in ALL if text.startswith(("sign", "top-k", "sparse-ternary", "threshold", "power-sgd"))]
WITH_FEEDBACK = [text for text in WITH_FEEDBACK if "feedback=false" not in text and "clip" not in text]
SEEDS = st.integers(0, 2**32 - 1)
SIZES = st.floats(-(2.0**95), 2.0**95, width=32)


def normal(count: int, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


# QSGD -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("levels", "norm"), [(1, 2), (7, 2), (7, "max"), (100, "max")])
def test_qsgd_is_right_on_average_and_within_its_variance(levels: int, norm: str | int) -> None:
    """The mean of many roundings is the value, and their variance has the bound of the paper."""
    count, trials = 64, 4000
    values = normal(count, seed=1)
    codec = parse_codec(f"qsgd(levels={levels}, norm={norm}, bucket={count}, raw_below=0)")
    state, out = codec.new_state(Parts.one(count), seed=5), torch.zeros(count)
    found = torch.empty(trials, count)
    for step in range(trials):
        state.decode(state.encode(values, step=step), out)
        found[step] = out
    error = (found.mean(0) - values).abs()
    assert (error <= 5 * found.std(0) / math.sqrt(trials) + 1e-6).all()
    variance = (found - values).square().sum(1).mean()
    bound = min(count / levels**2, math.sqrt(count) / levels) * values.square().sum()
    assert variance <= bound


@given(values=st.lists(SIZES, min_size=1, max_size=40), levels=st.integers(1, 127), seed=SEEDS)
def test_qsgd_rounds_to_a_neighbouring_level(values: list[float], levels: int, seed: int) -> None:
    flat = torch.tensor(values)
    state = QSGD(levels=levels, bucket=64, raw_below=0).new_state(Parts.one(flat.numel()), seed=seed)
    out = torch.empty_like(flat)
    state.decode(state.encode(flat, step=0), out)
    unit = float(flat.abs().max()) / levels
    assert ((out.double() - flat.double()).abs() <= unit * (1 + 1e-5) + 1e-44).all()
    assert (out.abs() <= flat.abs().max()).all()


@pytest.mark.parametrize(
    ("count", "levels", "bits"), [(10_000, 1, 0.106), (10_000, 7, 0.56), (10_000, 100, 2.76), (512, 15, 2.3)]
)
def test_bits_of_a_coordinate_in_elias_code(count: int, levels: int, bits: float) -> None:
    """Of normal values, rounded by the 2-norm of all of them."""
    total = 1_000_000 // count * count
    state = QSGD(levels=levels, bucket=count, norm=2, form="elias", raw_below=0).new_state(Parts.one(total), seed=0)
    found = 8 * state.encode(normal(total, seed=0), step=0).numel() / total
    assert found < bits


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("cast", 16),
        ("cast(to=fp8)", 8.07),
        ("qsgd", 4.07),
        ("qsgd(levels=127)", 8.07),
        ("qsgd(levels=1, bucket=128)", 2.25),
        ("sign", 1.01),
        ("top-k(density=0.001)", 0.0452),
    ],
)
def test_bits_of_a_coordinate(text: str, bits: float) -> None:
    count = 200_000
    packet = parse_codec(text).new_state(Parts.one(count), seed=0).encode(normal(count, seed=0), step=0)
    assert 8 * packet.numel() / count == pytest.approx(bits, rel=0.02)


def test_random_numbers_are_uniform_and_those_of_other_steps_are_others() -> None:
    one, other = (uniform(key_of(0, 0, step), 1 << 16) for step in (0, 1))
    for numbers in (one, other):
        assert float(numbers.mean()) == pytest.approx(0.5, abs=0.006)
        assert float(numbers.var()) == pytest.approx(1 / 12, rel=0.03)
        assert torch.histc(numbers, 16, 0, 1).sub(1 << 12).abs().max() < 5 * 64
    pairs = torch.stack([one[:-1], one[1:], other[:-1], other[1:]])
    assert (torch.corrcoef(pairs) - torch.eye(4)).abs().max() < 0.02


# Codes ----------------------------------------------------------------------------------------------------------------


@given(levels=st.lists(st.integers(-127, 127), max_size=200), zeros=st.integers(0, 5000))
def test_elias_codes_round_trip(levels: list[int], zeros: int) -> None:
    wanted = torch.cat([torch.zeros(zeros, dtype=torch.int64), torch.tensor(levels, dtype=torch.int64)])
    into = torch.zeros(most_bytes(wanted.numel()), dtype=torch.uint8)
    end = write(into, 0, wanted.abs(), wanted < 0, 127)
    found, negative = read(Reader(into[:end]), wanted.numel(), 127)
    assert torch.equal(torch.where(negative, -found, found), wanted)


@given(chosen=st.sets(st.integers(0, 100_000), max_size=300), more=st.integers(1, 10**6), seed=SEEDS)
def test_gaps_round_trip(chosen: set[int], more: int, seed: int) -> None:
    indices = torch.tensor(sorted(chosen), dtype=torch.int64)
    total = max(chosen, default=0) + more
    bits = torch.randint(2, indices.shape, generator=torch.Generator().manual_seed(seed))
    into = torch.zeros(most_gap_bytes(indices.numel(), total), dtype=torch.uint8)
    end = write_gaps(into, 0, indices, total, bits)
    found, found_bits = read_gaps(Reader(into[:end]), indices.numel(), total, bits=True)
    assert torch.equal(found, indices) and torch.equal(found_bits, bits)


@given(values=st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-45]), max_size=50), data=st.data())
def test_the_largest_are_the_largest(values: list[float], data: st.DataObject) -> None:
    flat = torch.tensor(values)
    count = data.draw(st.integers(0, len(values)))
    order = sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))
    assert largest(flat, count).tolist() == sorted(order[:count])


@pytest.mark.parametrize("make", [normal, lambda count, _: torch.ones(count), lambda count, _: torch.arange(count)])
def test_the_largest_of_many(make: Callable[[int, int], Tensor]) -> None:
    values = make(60_000, 0).float()
    order = torch.sort(values.abs(), descending=True, stable=True).indices
    for count in (0, 1, 60, 15_000, 60_000):
        assert torch.equal(largest(values, count), order[:count].sort().values)
    assert 0.8 * 600 <= about_largest(values, 600, 6000).numel() <= 1.3 * 600


# Error feedback -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", WITH_FEEDBACK)
@given(seed=SEEDS)
def test_what_was_sent_and_what_waits_is_all_that_came(text: str, seed: int) -> None:
    """To rounding; exactly where numbers are such that sums of them are exact."""
    codec = parse_codec(text)
    state, out = codec.new_state(MADE_OF, seed=0), torch.zeros(MADE_OF.count)
    came, sent = torch.zeros(MADE_OF.count, dtype=torch.float64), torch.zeros(MADE_OF.count, dtype=torch.float64)
    exact = codec.name in ("top-k", "threshold") and not getattr(codec, "adaptive", 0)
    for step in range(4):
        values = normal(MADE_OF.count, seed + step)
        values = (values * 8).round() / 8 if exact else values
        came += values
        state.decode(state.encode(values, step=step), out)
        sent += out
    error = (sent + state.memory["residual"] - came).abs().max()
    assert error == 0 if exact else error < 1e-5


def test_momentum_is_corrected_and_masked() -> None:
    """Step by step as Lin et al. (2018): u = m u + g, v = v + u, and both are 0 where v was sent."""
    state, out = TopK(density=0.25, momentum=0.5).new_state(Parts.one(4), seed=0), torch.zeros(4)
    u, v = torch.zeros(4), torch.zeros(4)
    for step in range(6):
        g = (8 * normal(4, step)).round()
        u = 0.5 * u + g
        v = v + u
        top = v.abs().argmax()
        state.decode(state.encode(g, step=step), out)
        assert out[top] == v[top] and out.count_nonzero() <= 1
        u[top] = v[top] = 0
        assert torch.equal(state.memory["momentum"], u) and torch.equal(state.memory["residual"], v)


def test_the_density_warms_up_in_four_stages() -> None:
    codec = TopK(density=0.001, warm_up=8)
    found = [codec.density_at(step) for step in (0, 1, 2, 4, 6, 7, 8, 100)]
    assert found == [0.25, 0.25, 0.0625, 0.015625, 0.00390625, 0.00390625, 0.001, 0.001]


def test_without_feedback_nothing_waits() -> None:
    state, out = TopK(density=0.25, feedback=False).new_state(Parts.one(4), seed=0), torch.zeros(4)
    for step in range(3):
        state.decode(state.encode(torch.tensor([1.0, -5.0, 2.0, 3.0]), step=step), out)
        assert torch.equal(out, torch.tensor([0.0, -5.0, 0.0, 0.0])) and not state.memory
    with pytest.raises(UsageError, match="give it to the optimizer"):
        TopK(feedback=False, momentum=0.9)


def test_values_are_clipped_together() -> None:
    state, out = TopK(density=1.0, clip=2.5).new_state(parts((1,), (1,)), seed=0), torch.zeros(2)
    state.decode(state.encode(torch.tensor([3.0, 4.0]), step=0), out)
    assert torch.equal(out, torch.tensor([1.5, 2.0]))


def test_an_adaptive_threshold_finds_the_share() -> None:
    count = 20_000
    state = parse_codec("threshold(tau=100, adaptive=0.01)").new_state(Parts.one(count), seed=0)
    out, sent = torch.zeros(count), []
    for step in range(400):
        state.decode(state.encode(normal(count, step), step=step), out)
        sent.append(int(out.count_nonzero()))
    assert sum(sent[-100:]) / 100 == pytest.approx(0.01 * count, rel=0.25)


# Ranks ----------------------------------------------------------------------------------------------------------------


class Done:
    """An exchange that has ended."""

    def __init__(self, result: Sequence[Tensor] = ()) -> None:
        self._result = result

    def wait(self) -> Sequence[Tensor]:
        return self._result


class Rank:
    """One of some threads, as a collective: sums in the order of ranks, and gathers."""

    def __init__(self, rank: int, size: int, given: list[Tensor | None], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._given, self._barrier = rank, size, given, barrier

    def gather_packets(self, packet: Tensor) -> Done:
        self._given[self.rank] = packet.clone()
        self._barrier.wait()
        found = [tensor for tensor in self._given if tensor is not None]
        self._barrier.wait()
        return Done(found)

    def all_reduce(self, tensor: Tensor) -> Done:
        total = torch.stack([*self.gather_packets(tensor).wait()]).sum(0)
        tensor.copy_(total)
        return Done()


def on_ranks(size: int, work: Callable[[Rank], T]) -> list[T]:
    given: list[Tensor | None] = [None] * size
    barrier, found, failures = threading.Barrier(size, timeout=60), dict[int, T](), list[BaseException]()

    def run(rank: int) -> None:
        try:
            found[rank] = work(Rank(rank, size, given, barrier))
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [found[rank] for rank in range(size)]


@pytest.mark.parametrize("text", ALL)
def test_ranks_stay_equal(text: str) -> None:
    def work(group: Rank) -> Tensor:
        state = parse_codec(text).new_state(MADE_OF, seed=group.rank)
        sums = []
        for step in range(3):
            flat = normal(MADE_OF.count, 10 * step + group.rank) / group.size
            state.reduce(flat, group, step=step).wait()
            sums.append(flat)
        return torch.stack(sums)

    first, *others = on_ranks(3, work)
    assert torch.isfinite(first).all() and first.any()
    assert all(torch.equal(first.view(torch.uint8), other.view(torch.uint8)) for other in others)


@pytest.mark.parametrize("text", ALL)
def test_what_is_not_finite_on_one_rank_is_nan_on_all(text: str) -> None:
    def work(group: Rank) -> Tensor:
        flat = torch.ones(MADE_OF.count)
        if group.rank == 1:
            flat[3] = math.nan
        parse_codec(text).new_state(MADE_OF, seed=group.rank).reduce(flat, group, step=0).wait()
        return flat

    assert all(flat.isnan().any() for flat in on_ranks(3, work))


def test_the_majority_votes() -> None:
    def work(group: Rank) -> Tensor:
        flat = torch.tensor([1.0, -1.0, 1.0, -1.0]) * torch.tensor([1.0, 1.0, 1.0 if group.rank else -1.0, 1.0])
        parse_codec("sign(vote=majority)").new_state(Parts.one(4), seed=0).reduce(flat, group, step=0).wait()
        return flat

    assert all(torch.equal(flat, torch.tensor([3.0, -3.0, 3.0, -3.0])) for flat in on_ranks(3, work))


def reduced(inputs: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """What each rank gets by one reduction with PowerSGD, and what it then remembers as lacking."""

    def work(group: Rank) -> tuple[Tensor, Tensor]:
        state, flat = PowerSGD(rank=2).new_state(MADE_OF, seed=0), inputs[group.rank].clone()
        state.reduce(flat, group, step=0).wait()
        return flat, state.memory["residual"]

    return on_ranks(len(inputs), work)


@given(seed=SEEDS)
def test_power_sgd_of_the_sum_is_the_sum_of_power_sgd(seed: int) -> None:
    """For the same Q, and to rounding; and what all ranks lack is the sum without what was sent."""
    inputs = [normal(MADE_OF.count, seed + rank) for rank in range(3)]
    total = torch.stack(inputs).sum(0)
    ((alone, _),) = reduced([total])
    together = reduced(inputs)
    assert torch.allclose(together[0][0], alone, atol=1e-4)
    assert torch.allclose(together[0][0] + sum(lacking for _, lacking in together), total, atol=1e-4)


def test_power_sgd_is_exact_for_matrices_of_low_rank_and_survives_zeros() -> None:
    made_of = parts((20, 30))
    state, out = PowerSGD(rank=2).new_state(made_of, seed=0), torch.zeros(600)
    state.decode(state.encode(torch.zeros(600), step=0), out)
    assert not out.any()
    # Of a Q that is nearly blind to one of the two directions (as for seed 2) the error would be larger, by rounding.
    matrix = (normal(40, 1).view(20, 2) @ normal(60, 3).view(2, 30)).flatten()
    state.decode(state.encode(matrix, step=1), out)
    assert torch.allclose(out, matrix, atol=1e-4)


# State ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ALL)
def test_a_saved_state_goes_on_with_the_same_bits(text: str) -> None:
    def packets(state: object, steps: range) -> list[Tensor]:
        return [state.encode(normal(MADE_OF.count, step), step=step) for step in steps]  # type: ignore[attr-defined]

    codec = parse_codec(text)
    whole, first, second = (codec.new_state(MADE_OF, seed=4) for _ in range(3))
    wanted = packets(whole, range(6))
    packets(first, range(3))
    saved = first.state_dict()
    packets(first, range(3, 4))  # what was saved is a copy
    second.load_state_dict(saved)
    assert all(torch.equal(*both) for both in zip(packets(second, range(3, 6)), wanted[3:], strict=True))
