"""Who gets which samples when there are many workers, and where they go on after a checkpoint."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import World
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from joined_batch import backward, one_weight
from torch import Tensor
from torch.optim import SGD
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
)

import paceline
from paceline.errors import CheckpointError, UsageError


class Numbers(Dataset[Tensor]):
    """0, 1, 2, ... as samples."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: int) -> Tensor:
        return torch.tensor([float(place)])


class Counting(IterableDataset[Tensor]):
    """As many numbers as it is told, from a start."""

    def __init__(self, start: int, length: int) -> None:
        self._numbers = range(start, start + length)

    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.tensor([float(number)]) for number in self._numbers])


Source = Callable[[int], Any]  # what a worker gives to session.batches, by rank


def take(
    group: Any,
    source: Source,
    *,
    stop: int | None = None,
    file: Path | None = None,
    resume: bool = False,
    epochs: int = 1,
    **options: Any,
) -> list[list[int]]:
    """The samples that this worker was given by step (only those that count), up to a checkpoint after ``stop``."""
    model = one_weight()
    seen = []
    with paceline.join(
        model, SGD(model.parameters(), lr=0.0), seed=5, resume=file if resume and file else False, group=group
    ) as session:
        for batch in session.batches(source(session.rank), epochs=epochs, **options):
            values = batch[0] if isinstance(batch, list | tuple) else batch
            with session.step() as step:
                backward(model(values).mean())
            seen.append([int(value) for value in values.flatten()] if step.examples else [])
            if session.steps == stop:
                session.save(file)
                break
    return seen


def flat(everybody: list[list[list[int]]]) -> list[int]:
    return sorted(sample for worker in everybody for batch in worker for sample in batch)


# An epoch -----------------------------------------------------------------------------------------------------


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    workers=st.integers(2, 4),
    num_samples=st.integers(4, 30),
    batch_size=st.integers(1, 4),
    shuffle=st.booleans(),
    loads=st.booleans(),
)
def test_an_epoch_gives_every_sample_once(
    world: World, workers: int, num_samples: int, batch_size: int, shuffle: bool, loads: bool
) -> None:
    """From a data set, or from a plain DataLoader of one; even if there are fewer samples left than workers."""
    if loads:
        loader = DataLoader(Numbers(num_samples), batch_size, shuffle=shuffle)
        everybody = world(workers, lambda group: take(group, lambda _: loader))
    else:
        data = TensorDataset(torch.arange(float(num_samples)).reshape(-1, 1))
        everybody = world(
            workers, lambda group: take(group, lambda _: data, batch_size=min(batch_size, num_samples), shuffle=shuffle)
        )
    assert flat(everybody) == list(range(num_samples))
    assert len({len(worker) for worker in everybody}) == 1
    if not shuffle:
        steps = zip(*everybody, strict=True)
        assert [sample for step in steps for batch in step for sample in batch] == list(range(num_samples))


@pytest.mark.parametrize(("last", "counts"), [("short", {1: 10}), ("drop", {1: 8}), ("pad", {1: 8, 2: 2})])
def test_the_end_of_an_epoch(world: World, last: str, counts: dict[int, int]) -> None:
    everybody = world(2, lambda group: take(group, lambda _: Numbers(10), batch_size=2, last=last))
    assert Counter(Counter(flat(everybody)).values()) == counts


def test_options_of_a_loader_stay(world: World) -> None:
    def source(_: int) -> DataLoader[Tensor]:
        return DataLoader(Numbers(11), 2, drop_last=True, collate_fn=lambda samples: -torch.stack(samples))

    everybody = world(2, lambda group: take(group, source))
    assert flat(everybody) == [-7, -6, -5, -4, -3, -2, -1, 0]


def test_a_loader_that_takes_only_some_samples_takes_as_many_on_each_worker(world: World) -> None:
    data = Numbers(24)

    def source(_: int) -> DataLoader[Tensor]:
        return DataLoader(data, 2, sampler=RandomSampler(data, num_samples=8))

    everybody = world(2, lambda group: take(group, source))
    assert [len(flat([worker])) for worker in everybody] == [8, 8]


def test_a_loader_with_a_sampler_for_workers_is_left_alone(world: World) -> None:
    data = Numbers(10)

    def source(rank: int) -> DataLoader[Tensor]:
        return DataLoader(data, 2, sampler=DistributedSampler(data, num_replicas=2, rank=rank, shuffle=True, seed=4))

    everybody = world(2, lambda group: take(group, source, epochs=2))
    assert flat(everybody) == sorted([*range(10), *range(10)])
    for rank, worker in enumerate(everybody):
        sampler: DistributedSampler[Tensor] = DistributedSampler(data, num_replicas=2, rank=rank, shuffle=True, seed=4)
        for epoch in (0, 1):
            sampler.set_epoch(epoch)
            assert [sample for batch in worker[3 * epoch : 3 * epoch + 3] for sample in batch] == list(sampler)


@pytest.mark.parametrize("lengths", [(2, 5), (5, 2), (3, 3), (1, 7)])
def test_workers_whose_data_ends_early_go_along_without_weight(world: World, lengths: tuple[int, int]) -> None:
    everybody = world(2, lambda group: take(group, lambda rank: Counting(100 * rank, lengths[rank]), batch_size=1))
    assert flat(everybody) == [*range(lengths[0]), *range(100, 100 + lengths[1])]
    assert [len(worker) for worker in everybody] == [max(lengths)] * 2


def test_a_worker_without_any_data_is_told(world: World) -> None:
    with pytest.raises(UsageError, match="gave no batch, but"):
        world(2, lambda group: take(group, lambda rank: Counting(0, 3 * rank), batch_size=1))


class Batch:
    """A batch of the user's own kind, of which nobody else knows how many examples it has."""

    def __init__(self, values: Tensor) -> None:
        self.values = values


KINDS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda values: values, lambda batch: batch),
    "pair": (lambda values: (values, values), lambda batch: batch[0]),
    "dict": (lambda values: {"name": "a", "x": values}, lambda batch: batch["x"]),
    "numpy": (lambda values: values.numpy(), lambda batch: torch.from_numpy(batch)),
    "numpy pair": (lambda values: (values.numpy(), 1), lambda batch: torch.from_numpy(batch[0])),
    "numbers": (lambda values: values.flatten().tolist(), lambda batch: torch.tensor(batch).reshape(-1, 1)),
    "own": (Batch, lambda batch: batch.values),
}


UNCOUNTED = {"numbers", "own"}


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_any_kind_train_or_are_refused(world: World, kind: str) -> None:
    """A kind that cannot be counted must not count as empty: every gradient would be zero, in silence."""
    wrap, unwrap = KINDS[kind]
    batches = [wrap(torch.ones(2, 1)) for _ in range(3)]

    def work(group: Any) -> float:
        model = one_weight()
        with paceline.join(model, SGD(model.parameters(), lr=0.25), group=group) as session:
            for batch in session.batches(batches, epochs=1):
                with session.step():
                    backward(model(unwrap(batch)).mean())
        return model.weight.item()

    if kind in UNCOUNTED:
        with pytest.raises(UsageError, match="examples"):
            world(2, work)
    else:
        assert world(2, work) == [0.25, 0.25]


# Going on after a checkpoint ----------------------------------------------------------------------------------


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    before=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    after=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    num_samples=st.integers(13, 25),
    stop=st.integers(1, 3),
)
def test_another_number_of_workers_takes_the_rest_of_the_epoch(
    world: World, before: tuple[int, int], after: tuple[int, int], num_samples: int, stop: int
) -> None:
    """Numbers of workers and batch sizes, before and after."""
    stop = min(stop, num_samples // (before[0] * before[1]))
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "checkpoint.safetensors"

        def work(group: Any, batch_size: int, **more: Any) -> list[list[int]]:
            return take(group, lambda _: Numbers(num_samples), batch_size=batch_size, file=file, **more)

        seen = world(before[0], lambda group: work(group, before[1], stop=stop))
        rest = world(after[0], lambda group: work(group, after[1], resume=True))
    assert flat(seen) == sorted(set(flat(seen)))
    assert sorted(flat(seen) + flat(rest)) == list(range(num_samples))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (2, 2), (1, 1)])
def test_a_loader_on_another_number_of_workers_covers_the_epoch_or_is_refused(
    world: World, before: int, after: int, shuffle: bool, tmp_path: Path
) -> None:
    """One worker takes a loader as it is, several share its data set out: positions must not be mistaken."""
    file = tmp_path / "checkpoint.safetensors"

    def source(_: int) -> DataLoader[Tensor]:
        return DataLoader(Numbers(24), 2, shuffle=shuffle)

    seen = world(before, lambda group: take(group, source, file=file, stop=2))
    try:
        rest = world(after, lambda group: take(group, source, file=file, resume=True))
    except (UsageError, CheckpointError):
        return
    assert sorted(flat(seen) + flat(rest)) == list(range(24))


@pytest.mark.parametrize("lengths", [(2, 6), (6, 2), (6, 5)])
def test_iterables_of_other_lengths_are_resumed(world: World, lengths: tuple[int, int], tmp_path: Path) -> None:
    """At a checkpoint when one worker has no data any more, and its place is that of the others all the same."""
    file = tmp_path / "checkpoint.safetensors"

    def source(rank: int) -> Counting:
        return Counting(100 * rank, lengths[rank])

    seen = world(2, lambda group: take(group, source, batch_size=1, file=file, stop=4))
    rest = world(2, lambda group: take(group, source, batch_size=1, file=file, resume=True))
    assert sorted(flat(seen) + flat(rest)) == [*range(lengths[0]), *range(100, 100 + lengths[1])]
    assert [len(worker) for worker in rest] == [2, 2]


def test_loaders_whose_generators_differ_by_worker_are_not_resumed(world: World, tmp_path: Path) -> None:
    """Worker 0 writes the checkpoint, and its generator must not become the others'."""
    file = tmp_path / "checkpoint.safetensors"

    def source(rank: int) -> DataLoader[Tensor]:
        mine = range(12 * rank, 12 * rank + 12)
        generator = torch.Generator().manual_seed(rank)
        return DataLoader(Numbers(24), 2, sampler=SubsetRandomSampler(mine, generator=generator))

    whole = world(2, lambda group: take(group, source))
    world(2, lambda group: take(group, source, file=file, stop=2))
    with pytest.raises(UsageError, match="generator of its own"):
        world(2, lambda group: take(group, source, file=file, resume=True))
    assert flat(whole) == list(range(24))
