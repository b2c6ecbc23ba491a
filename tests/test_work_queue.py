"""Laws of handing out batches: each used once an epoch, whatever workers do with them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.sampler import Last, ShardedSampler
from paceline.errors import UsageError
from paceline.server.work_queue import WorkQueue

WORKERS = 4
EPOCHS = 3
Deed = tuple[str, int]
deeds = st.lists(
    st.tuples(st.sampled_from(["take", "take", "take", "use", "give_back", "save"]), st.integers(0, WORKERS - 1)),
    max_size=80,
)
endings: st.SearchStrategy[Last] = st.sampled_from(get_args(Last))


def described(num_samples: int = 10, batch_size: int = 3, last: Last = "short") -> WorkQueue:
    queue = WorkQueue()
    queue.describe(num_samples, batch_size, last, True)
    return queue


@dataclass
class Processes:
    """Workers that take, use and give back, and an account of it apart from the queue's."""

    queue: WorkQueue
    held: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: {worker: [] for worker in range(WORKERS)})
    used: Counter[tuple[int, int]] = field(default_factory=Counter)

    def play(self, deeds: list[Deed]) -> None:
        for name, worker in deeds:
            getattr(self, name)(worker)

    def take(self, worker: int) -> None:
        batch = self.queue.take(worker, EPOCHS)
        if batch is not None:
            assert not any(batch in batches for batches in self.held.values()), "handed to two at once"
            self.held[worker].append(batch)

    def use(self, worker: int) -> None:
        self.queue.use(worker)
        self.used.update(self.held[worker])
        self.held[worker] = []

    def give_back(self, worker: int) -> None:
        self.queue.give_back(worker)
        self.held[worker] = []

    def save(self, _: int = 0) -> None:
        """The run ends, and another goes on from its checkpoint."""
        saved = json.loads(json.dumps(self.queue.state_dict()))
        self.queue = WorkQueue()
        self.queue.load_state_dict(saved)
        self.held = {worker: [] for worker in self.held}

    def work_to_the_end(self) -> None:
        for worker in self.held:
            self.give_back(worker)
        while not self.queue.finished(EPOCHS):
            self.take(0)
            self.use(0)


@given(deeds=deeds, num_samples=st.integers(1, 12), data=st.data(), last=endings)
def test_every_batch_of_every_epoch_is_used_once(
    deeds: list[Deed], num_samples: int, data: st.DataObject, last: Last
) -> None:
    batch_size = data.draw(st.integers(1, num_samples))
    processes = Processes(described(num_samples, batch_size, last))
    processes.play(deeds)
    processes.work_to_the_end()
    batches = ShardedSampler(num_samples, batch_size, last=last).steps_per_epoch
    assert processes.used == {(epoch, batch): 1 for epoch in range(EPOCHS) for batch in range(batches)}


@given(deeds=deeds)
def test_the_oldest_batch_that_nobody_has_goes_out_first(deeds: list[Deed]) -> None:
    processes = Processes(described())
    processes.play(deeds)
    everything = [(epoch, batch) for epoch in range(EPOCHS) for batch in range(4)]
    taken = processes.used.keys() | {batch for batches in processes.held.values() for batch in batches}
    oldest = next((batch for batch in everything if batch not in taken), None)
    assert processes.queue.take(0, EPOCHS) == oldest


@given(deeds=deeds)
def test_an_epoch_is_finished_when_all_its_batches_are_used(deeds: list[Deed]) -> None:
    processes = Processes(described())
    processes.play(deeds)
    used = [sum(epoch == of for of, _ in processes.used) == 4 for epoch in range(EPOCHS)]
    done = next((epoch for epoch, all_used in enumerate(used) if not all_used), EPOCHS)
    assert processes.queue.epoch == done
    for epochs in range(EPOCHS + 1):
        assert processes.queue.finished(epochs) == (epochs <= done)


@given(deeds=deeds)
def test_what_was_saved_goes_on_as_if_all_leases_had_come_back(deeds: list[Deed]) -> None:
    processes = Processes(described())
    processes.play(deeds)
    saved = processes.queue.state_dict()
    for worker in processes.held:
        processes.give_back(worker)
    assert processes.queue.state_dict() == saved
    later = WorkQueue()
    later.load_state_dict(saved)
    assert later.state_dict() == saved
    assert [later.take(1, EPOCHS) for _ in range(5)] == [processes.queue.take(2, EPOCHS) for _ in range(5)]


def test_several_leases_of_a_step_come_back_together() -> None:
    queue = described()
    assert [queue.take(worker, 1) for worker in (7, 8, 7)] == [(0, 0), (0, 1), (0, 2)]
    queue.give_back(7)
    assert [queue.take(8, 1) for _ in range(4)] == [(0, 0), (0, 2), (0, 3), None]


def test_a_later_epoch_begins_when_it_is_asked_for() -> None:
    queue = described(4, 2)
    assert [queue.take(0, 1) for _ in range(3)] == [(0, 0), (0, 1), None]
    assert queue.take(1, 2) == (1, 0)
    queue.give_back(1)
    assert queue.take(0, 1) is None  # what came back is of an epoch that it did not ask for
    queue.use(0)
    assert queue.finished(1) and not queue.finished(2)
    assert queue.take(1, 2) == (1, 0)


@pytest.mark.parametrize(("last", "batches"), [("short", 4), ("pad", 4), ("drop", 3)])
def test_the_last_batch(last: Last, batches: int) -> None:
    queue = described(10, 3, last)
    assert [queue.take(0, 1) is not None for _ in range(5)].count(True) == batches


def test_workers_that_hold_nothing_use_and_give_back_nothing() -> None:
    queue = described()
    before = queue.state_dict()
    queue.use(3)
    queue.give_back(3)
    assert queue.state_dict() == before


def test_other_data_is_refused_and_the_first_stays() -> None:
    queue = described(10, 3)
    queue.describe(10, 3, "short", True)
    with pytest.raises(
        UsageError,
        match=r"first it was 10 samples shuffled in batches of 3 \(last='short'\), "
        r"now 10 samples in order in batches of 4 \(last='drop'\)",
    ):
        queue.describe(10, 4, "drop", False)
    assert queue.state_dict()["data"] == [10, 3, "short", True]


def test_a_resumed_run_must_have_the_data_that_it_had() -> None:
    later = WorkQueue()
    later.load_state_dict(described(10, 3).state_dict())
    with pytest.raises(UsageError, match="a resumed run those that it had"):
        later.describe(11, 3, "short", True)


def test_data_that_makes_no_batches_is_refused() -> None:
    with pytest.raises(UsageError, match="the data set is empty"):
        described(0, 1)
    with pytest.raises(UsageError, match="batch of 3 asked for, data set has 2 samples"):
        described(2, 3, "drop")


def test_before_the_data_is_known_nothing_is_handed_out_or_finished() -> None:
    queue = WorkQueue()
    with pytest.raises(UsageError, match="before the data was described"):
        queue.take(0, 1)
    assert queue.finished(0) and not queue.finished(1)
    assert queue.epoch == 0
    later = WorkQueue()
    later.load_state_dict(queue.state_dict())
    later.describe(4, 2, "short", True)
    assert later.take(0, 1) == (0, 0)


def test_what_waits_for_a_commit_is_used_but_not_in_a_checkpoint() -> None:
    queue = WorkQueue()
    queue.describe(num_samples=3, batch_size=1, last="short", shuffle=False)
    for worker in range(3):
        queue.take(worker, epochs=1)
        queue.push(worker, step=7)
    assert queue.finished(epochs=1)
    assert queue.state_dict()["unused"] == [0, 1, 2]
    queue.give_back(0)  # it had nothing any more
    queue.commit([(2, 7), (0, 7)])
    assert queue.state_dict()["unused"] == [1]
    queue.commit([(1, 7)])
    assert queue.state_dict()["unused"] == []
