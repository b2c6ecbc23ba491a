"""Where batches come from, and where a session stands among them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from same_bits import assert_same
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from training_cases import DATASET, Augmented

from paceline.data.feed import DatasetFeed, Feed, Fetched, LoaderFeed, count_examples
from paceline.data.sampler import ShardedSampler
from paceline.data.stream import BatchStream
from paceline.errors import UsageError
from paceline.seeding import capture_streams

law = settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])


class Listed(Dataset[Any]):
    """The same samples, without a short cut for tensors."""

    def __len__(self) -> int:
        return len(DATASET)

    def __getitem__(self, place: int) -> Any:
        return DATASET[place]


class InBulk(Listed):
    def __getitems__(self, places: list[int]) -> list[Any]:
        return [DATASET[place] for place in places]


def sampler(batch_size: int, **options: Any) -> ShardedSampler:
    return ShardedSampler(len(DATASET), batch_size, seed=4, **options)


def alone(loader: Iterable[Any]) -> LoaderFeed:
    return LoaderFeed(loader, several=False, largest=int)


def data_of(fetched: Iterator[Fetched]) -> list[Any]:
    return [batch.data for batch in fetched]


@law
@given(
    st.sampled_from([DATASET, Listed(), InBulk()]),
    st.integers(1, 40),
    st.sampled_from(["short", "drop", "pad"]),
    st.integers(0, 3),
    st.data(),
)
def test_a_data_set_feed_starts_anywhere(
    dataset: Dataset[Any], batch_size: int, last: Any, epoch: int, data: st.DataObject
) -> None:
    feed = DatasetFeed(dataset, sampler(batch_size, last=last))
    whole = list(feed.start(epoch, 0))
    assert_same(
        [batch.data for batch in whole], data_of(DatasetFeed(DATASET, sampler(batch_size, last=last)).start(epoch, 0))
    )
    assert all(batch.examples == batch.total == len(batch.data[0]) for batch in whole)
    done = data.draw(st.integers(0, len(whole)))
    consumed = whole[done - 1].consumed if done else 0
    rest = list(feed.start(epoch, consumed))
    assert_same([batch.data for batch in rest], [batch.data for batch in whole[done:]])
    assert [batch.consumed for batch in rest] == [batch.consumed for batch in whole[done:]]


@law
@given(st.integers(1, 40), st.data())
def test_a_loader_feed_starts_anywhere(batch_size: int, data: st.DataObject) -> None:
    feed = alone(DataLoader(DATASET, batch_size))
    whole = list(feed.start(0, 0))
    assert [batch.consumed for batch in whole] == list(range(1, len(whole) + 1))
    done = data.draw(st.integers(0, len(whole)))
    assert_same(data_of(feed.start(0, done)), [batch.data for batch in whole[done:]])


def test_going_on_behind_the_end_gives_nothing() -> None:
    assert list(alone([1, 2]).start(0, 2)) == []
    assert list(alone([1, 2]).start(0, 7)) == []
    assert list(DatasetFeed(DATASET, sampler(7)).start(0, 40)) == []
    with pytest.raises(UsageError, match="another data set"):
        list(DatasetFeed(DATASET, sampler(7)).start(0, 41))


def test_a_loader_with_a_sampler_of_epochs_is_told_them() -> None:
    loader = DataLoader(DATASET, 8, sampler=DistributedSampler(DATASET, num_replicas=1, rank=0))
    feed = alone(loader)
    first, second = data_of(feed.start(0, 0)), data_of(feed.start(1, 0))
    assert not torch.equal(first[0][0], second[0][0])
    assert_same(data_of(feed.start(0, 2)), first[2:])


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}])
def test_a_data_set_feed_leaves_the_random_streams_alone(options: dict[str, Any]) -> None:
    before = capture_streams()
    list(DatasetFeed(Listed(), sampler(9), loader_options=options).start(0, 0))
    assert_same(capture_streams(), before)


def test_seeded_fetches_are_the_same_in_workers_and_from_anywhere() -> None:
    """What a random augmentation does to a batch depends on the batch alone."""

    def fetch(consumed: int = 0, **options: Any) -> list[Any]:
        random.seed()
        torch.seed()
        numpy.random.seed()
        return data_of(
            DatasetFeed(Augmented(), sampler(8), seeded_fetch=True, loader_options=options).start(2, consumed)
        )

    expected = fetch()
    assert_same(fetch(), expected)
    assert_same(fetch(num_workers=2), expected)
    assert_same(fetch(16, num_workers=1), expected[2:])
    assert len({float(batch[0].sum()) for batch in expected}) == 5


def test_workers_are_seeded_even_without_a_seed() -> None:
    def fetch(consumed: int, num_workers: int) -> list[Any]:
        options = {"num_workers": num_workers}
        return data_of(DatasetFeed(Augmented(), sampler(8), loader_options=options).start(0, consumed))

    assert_same(fetch(8, 1), fetch(0, 2)[1:])


@pytest.mark.parametrize(
    ("data", "count"),
    [
        (torch.zeros(5, 2), 5),
        (torch.zeros(()), 1),
        ([torch.zeros(3), torch.zeros(4)], 3),
        ((torch.zeros(3, 1), torch.zeros(3)), 3),
        ({"text": ["a"], "image": torch.zeros(4)}, 4),
        ([["a", "b"], {"x": (torch.zeros(2, 2),)}], 2),
        (["a", "b"], None),
        ("abc", None),
        (None, None),
        ([], None),
    ],
)
def test_examples_are_counted_in_the_first_tensor(data: Any, count: int | None) -> None:
    assert count_examples(data) == count


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        number = 0
        while True:
            yield torch.tensor(number)
            number += 1


def test_an_endless_loader_may_be_left_and_entered() -> None:
    stream, feed = BatchStream(), alone(DataLoader(Endless(), 2))
    seen: list[list[int]] = []
    for stop in (3, 5):
        for batch in stream.batches(lambda: feed, None):
            stream.use()
            seen.append(batch.tolist())
            if len(seen) == stop:
                break
    assert seen == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


@law
@given(st.booleans(), st.integers(0, 12), st.booleans())
def test_a_stream_goes_on_where_its_state_says(by_loader: bool, taken: int, step_done: bool) -> None:
    """Behind the last batch that was used; one that was only handed out comes again."""
    feed: Feed = alone(DataLoader(DATASET, 10)) if by_loader else DatasetFeed(DATASET, sampler(10))
    whole = list(BatchStream().batches(lambda: feed, 4))
    stream = BatchStream()
    batches = stream.batches(lambda: feed, 4)
    for number in range(taken):
        next(batches)
        if step_done or number < taken - 1:
            stream.use()
    state = stream.state_dict()
    other = BatchStream()
    other.load_state_dict(state)
    done = taken if step_done or not taken else taken - 1
    assert_same(list(other.batches(lambda: feed, 4)), whole[done:])
    assert other.epoch == 4


def test_epochs_are_counted_by_whoever_goes_through_them() -> None:
    feed = DatasetFeed(DATASET, sampler(10))
    stream = BatchStream()
    seen = [(epoch, len(list(stream.batches(lambda: feed, None)))) for epoch in stream.epochs(3)]
    assert seen == [(0, 4), (1, 4), (2, 4)]
    assert list(stream.epochs(3)) == []
    assert list(stream.epochs(5)) == [3, 4]  # a body that takes no batches
    assert len(list(stream.batches(lambda: feed, 7))) == 8
    assert list(stream.batches(lambda: feed, 7)) == []


def test_the_epoch_under_way_is_told() -> None:
    feed, stream = DatasetFeed(DATASET, sampler(20)), BatchStream()
    assert [stream.epoch for _ in stream.batches(lambda: feed, 3)] == [0, 0, 1, 1, 2, 2]
