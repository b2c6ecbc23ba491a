"""Laws of dealing out samples: who gets what, once each, whatever the number of workers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paceline.data.sampler import Last, Shard, ShardedSampler
from paceline.errors import UsageError

law = settings(deadline=None)
ENDINGS: st.SearchStrategy[Last] = st.sampled_from(get_args(Last))


def deal(sampler: ShardedSampler, consumed: int = 0) -> list[tuple[Shard, ...]]:
    """Every rank's shard of every step that is left in epoch 3."""
    ranks = [replace(sampler, rank=rank) for rank in range(sampler.world_size)]
    return list(zip(*(rank.epoch(3, consumed) for rank in ranks), strict=True))


def joined(step: tuple[Shard, ...]) -> list[int]:
    return [index for shard in step for index in shard.indices.tolist()]


@st.composite
def samplers(draw: st.DrawFn, last: Last | None = None, num_samples: int | None = None) -> ShardedSampler:
    size = num_samples or draw(st.integers(1, 60))
    ending: Last = draw(ENDINGS) if last is None else last
    world_size = draw(st.integers(1, min(size, 7)))
    most = size // world_size if ending == "drop" else size
    batch_size = draw(st.integers(1, most))
    return ShardedSampler(size, batch_size, world_size=world_size, seed=draw(st.integers(0, 3)), last=ending)


@law
@given(samplers(last="short"))
def test_short_takes_every_sample_once(sampler: ShardedSampler) -> None:
    taken = [index for step in deal(sampler) for index in joined(step)]
    assert sorted(taken) == list(range(sampler.num_samples))


@law
@given(samplers(last="short"))
def test_short_divides_the_last_step_evenly(sampler: ShardedSampler) -> None:
    *full, last = [[len(shard.indices) for shard in step] for step in deal(sampler)]
    assert all(counts == [sampler.batch_size] * sampler.world_size for counts in full)
    assert max(last) - min(last) <= 1
    assert max(last) <= sampler.batch_size


@law
@given(samplers(last="pad"))
def test_pad_gives_all_ranks_full_batches_and_every_sample(sampler: ShardedSampler) -> None:
    steps = deal(sampler)
    assert all(len(shard.indices) == sampler.batch_size for step in steps for shard in step)
    taken = [index for step in steps for index in joined(step)]
    order = sampler.order(3).tolist()
    assert taken == (order * (1 + len(taken) // len(order)))[: len(taken)]
    assert set(taken) == set(range(sampler.num_samples))
    assert len(taken) - sampler.num_samples < sampler.world_size * sampler.batch_size


@law
@given(samplers(last="drop"))
def test_drop_gives_all_ranks_full_batches_without_repeats(sampler: ShardedSampler) -> None:
    steps = deal(sampler)
    assert all(len(shard.indices) == sampler.batch_size for step in steps for shard in step)
    taken = [index for step in steps for index in joined(step)]
    assert len(set(taken)) == len(taken)
    assert sampler.num_samples - len(taken) < sampler.world_size * sampler.batch_size


@law
@given(samplers())
def test_every_rank_knows_every_count(sampler: ShardedSampler) -> None:
    for step in deal(sampler):
        counts = [len(shard.indices) for shard in step]
        for shard in step:
            assert [shard.count(rank) for rank in range(sampler.world_size)] == counts
            assert shard.total == sum(counts) > 0


@law
@given(samplers())
def test_many_workers_take_what_one_would_with_the_joined_batch(sampler: ShardedSampler) -> None:
    step_size = sampler.world_size * sampler.batch_size
    assume(step_size <= sampler.num_samples)
    one = replace(sampler, world_size=1, batch_size=step_size)
    many = deal(sampler)
    assert [joined(step) for step in many] == [shard.indices.tolist() for shard in one.epoch(3)]
    assert [step[0].consumed_after for step in many] == [shard.consumed_after for shard in one.epoch(3)]


@law
@given(samplers())
def test_the_number_of_steps_is_known_before(sampler: ShardedSampler) -> None:
    steps = deal(sampler)
    assert sampler.steps_per_epoch == len(steps)
    for done, step in enumerate(steps, 1):
        assert sampler.steps_left(step[0].consumed_after) == len(steps) - done


@law
@given(samplers(), st.data())
def test_an_epoch_goes_on_from_any_step(sampler: ShardedSampler, data: st.DataObject) -> None:
    steps = deal(sampler)
    done = data.draw(st.integers(0, len(steps)))
    consumed = steps[done - 1][0].consumed_after if done else 0
    rest = deal(sampler, consumed)
    assert [joined(step) for step in rest] == [joined(step) for step in steps[done:]]
    assert [[shard.number for shard in step] for step in rest] == [[s.number for s in step] for step in steps[done:]]


@st.composite
def changing_worlds(draw: st.DrawFn) -> list[tuple[ShardedSampler, int]]:
    """A chain of (sampler, steps it takes), all over the same samples and seed."""
    size = draw(st.integers(1, 80))
    chain = draw(st.lists(st.tuples(samplers(last="short", num_samples=size), st.integers(0, 4)), max_size=5))
    final = draw(samplers(last="short", num_samples=size))
    return [*((replace(sampler, seed=1), steps) for sampler, steps in chain), (replace(final, seed=1), size)]


@law
@given(changing_worlds())
def test_workers_may_change_in_mid_epoch(chain: list[tuple[ShardedSampler, int]]) -> None:
    taken: list[int] = []
    numbers: list[int] = []
    for sampler, num_steps in chain:
        for step in deal(sampler, consumed=len(taken))[:num_steps]:
            taken += joined(step)
            numbers += [shard.number for shard in step]
            assert {shard.consumed_after for shard in step} == {len(taken)}
    assert taken == chain[0][0].order(3).tolist()
    assert sorted(taken) == list(range(chain[0][0].num_samples))
    assert len(set(numbers)) == len(numbers)


@law
@given(samplers())
def test_numbers_are_unique_and_tell_where_a_full_batch_starts(sampler: ShardedSampler) -> None:
    order = sampler.order(3)
    shards = [shard for step in deal(sampler) for shard in step]
    assert len({shard.number for shard in shards}) == len(shards)
    for shard in shards:
        if shard.total == sampler.world_size * sampler.batch_size:
            assert shard.indices[0] == order[shard.number % sampler.num_samples]


@law
@given(st.integers(20, 100), st.integers(0, 1000), st.integers(0, 1000))
def test_the_order_depends_on_seed_and_epoch_alone(size: int, seed: int, epoch: int) -> None:
    sampler = ShardedSampler(size, 3, seed=seed)
    order = sampler.order(epoch)
    assert torch.equal(order, replace(sampler, batch_size=7, world_size=5, rank=2, last="pad").order(epoch))
    assert not torch.equal(order, sampler.order(epoch + 1))
    assert not torch.equal(order, replace(sampler, seed=seed + 1).order(epoch))


def test_the_order_leaves_the_random_streams_alone() -> None:
    before = torch.get_rng_state()
    list(ShardedSampler(10, 3).epoch(0))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("shuffle", [True, False])
def test_indices_stay_on_the_cpu_whatever_the_default_device(shuffle: bool) -> None:
    sampler = ShardedSampler(5, 3, shuffle=shuffle, last="pad")
    plain = [joined(step) for step in deal(sampler)]
    with torch.device("meta"):
        assert [joined(step) for step in deal(sampler)] == plain


def test_orders_never_change() -> None:
    assert ShardedSampler(8, 2, seed=1).order(0).tolist() == [1, 6, 7, 2, 3, 4, 0, 5]
    assert ShardedSampler(8, 2, seed=1).order(1).tolist() == [4, 1, 7, 3, 0, 5, 2, 6]


def test_all_orders_are_about_equally_likely() -> None:
    seen = [tuple(ShardedSampler(3, 1).order(epoch).tolist()) for epoch in range(600)]
    assert all(60 <= seen.count(order) <= 140 for order in set(seen))
    assert len(set(seen)) == math.factorial(3)


def test_without_shuffling_samples_come_in_their_own_order() -> None:
    sampler = ShardedSampler(7, 2, world_size=2, shuffle=False)
    assert [[s.indices.tolist() for s in step] for step in deal(sampler)] == [
        [[0, 1], [2, 3]],
        [[4], [5, 6]],
    ]
    padded = replace(sampler, last="pad")
    assert joined(deal(padded)[-1]) == [4, 5, 6, 0]


def test_a_rank_may_have_nothing_left_and_still_takes_its_step() -> None:
    sampler = ShardedSampler(5, 1, world_size=4, shuffle=False)
    assert [[s.indices.tolist() for s in step] for step in deal(sampler)][-1] == [[], [], [], [4]]


def test_padding_longer_than_the_data_repeats_it() -> None:
    sampler = ShardedSampler(3, 3, world_size=3, shuffle=False, last="pad")
    assert [joined(step) for step in deal(sampler)] == [[0, 1, 2, 0, 1, 2, 0, 1, 2]]


def padded_as_on_the_slide(indices: list[int], total_size: int) -> list[int]:
    """A printed way of padding, with a minus sign too many: it cuts the padding off instead of taking it."""
    return indices + indices[: -(total_size - len(indices))]


@law
@given(samplers(last="pad"))
def test_padding_with_a_minus_sign_too_many_would_not_fill_up(sampler: ShardedSampler) -> None:
    size, step_size = sampler.num_samples, sampler.world_size * sampler.batch_size
    total_size = math.ceil(size / step_size) * step_size
    padding = total_size - size
    wrong = padded_as_on_the_slide(list(range(size)), total_size)
    assert (len(wrong) == total_size) == (padding == 0 or 2 * padding == size)
    assert sum(len(joined(step)) for step in deal(sampler)) == total_size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": 0}, "the data set is empty: it has 0 samples, and an epoch needs at least 1"),
        ({"num_samples": -1}, "num_samples must be at least 1, got -1"),
        ({"batch_size": 32.0}, "batch_size must be a whole number, got 32.0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"batch_size": -4}, "batch_size must be at least 1, got -4"),
        ({"world_size": 0}, "world_size must be at least 1, got 0"),
        ({"rank": 2, "world_size": 2}, "rank 2 is outside a world of 2; use 0 to 1"),
        ({"rank": -1}, "rank -1 is outside a world of 1"),
        (
            {"batch_size": 5000},
            "batch of 5000 asked for, data set has 1437 samples; use a batch of at most 1437",
        ),
        ({"batch_size": 5000, "world_size": 4}, "use a batch of at most 359"),
        ({"world_size": 1438}, "1438 workers, but the data set has 1437 samples; use at most 1437 workers"),
        (
            {"batch_size": 500, "world_size": 3, "last": "drop"},
            "takes 1500 samples, data set has 1437 samples; use a batch of at most 479",
        ),
        ({"last": "padd"}, "Did you mean 'pad'? Known: drop, pad, short."),
    ],
)
def test_impossible_sizes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        ShardedSampler(**{"num_samples": 1437, "batch_size": 64, **options})
    assert message in str(caught.value)


@pytest.mark.parametrize("consumed", [-1, 11])
def test_positions_outside_the_epoch_are_refused_at_once(consumed: int) -> None:
    with pytest.raises(UsageError, match=f"cannot go on after {consumed} samples of an epoch that has 10"):
        ShardedSampler(10, 2).epoch(0, consumed)


@pytest.mark.parametrize("last", ["short", "drop", "pad"])
def test_a_finished_epoch_has_nothing_left(last: Last) -> None:
    assert list(ShardedSampler(10, 3, last=last).epoch(0, consumed=10)) == []
