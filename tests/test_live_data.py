"""Loops under a live server in other forms: accumulating, on data of one's own, broken off, evaluating between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from led_by_hand import Hand, wait_until_read
from ledger import Ledger, Seen, samples, seen_trainee, times_used, train
from live import DEADLINE, Cluster
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from paceline.errors import UsageError
from paceline.sessions.worker import WorkerSession
from paceline.train_state import TrainState

COUNT = 12


class Pair:
    """A session, and a hand that overtakes its steps: under k-sync(k=1) any push does."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.hand = Hand(cluster, 1, model=Seen(COUNT))
        self.own = seen_trainee(COUNT)
        self.session: WorkerSession = cluster.session(self.own, 0)

    def advance(self) -> None:
        """Have a commit made by the other worker."""
        self.hand.ask()
        self.hand.push(0.0, examples=0)
        self.hand.go()

    def overtake(self) -> None:
        """Have the session's step cancelled; when this returns, the session can know."""
        self.advance()
        client = self.session._client
        assert client._connection is not None
        client._connection.wait(DEADLINE)

    def compute(self, places: Tensor, *, accumulate: bool = False, overtaken: bool = False) -> bool:
        """One block; whether it was cancelled."""
        with self.session.step(accumulate=accumulate) as step:
            if overtaken:
                self.overtake()
            torch.autograd.backward(self.own.model(places).mean())
        wait_until_read(self.session._client._connection)  # before anything that the hand says next
        return step.cancelled


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Cluster("k-sync(k=1)", seen_trainee(COUNT)) as cluster:
        pair = Pair(cluster)
        with pair.session:
            yield pair


def handed_out(pair: Pair, size: int = 2, **options: Any) -> Iterator[list[int]]:
    """The session's batches as lists of samples."""
    for (places,) in pair.session.batches(samples(COUNT), size, shuffle=False, **{"epochs": 1, **options}):
        yield places.tolist()


# Accumulating -----------------------------------------------------------------------------------------------


def test_accumulated_batches_make_one_push(pair: Pair) -> None:
    for number, places in enumerate(handed_out(pair)):
        assert not pair.compute(torch.tensor(places), accumulate=number % 3 != 2)
    assert [commit.examples for commit in pair.cluster.host.commits] == [6, 6]
    gradients = cast(Ledger, pair.cluster.train_state.optimizers[0]).gradients
    assert [(gradient * 2).tolist() for gradient in gradients] == [[1.0] * 6 + [0.0] * 6, [0.0] * 6 + [1.0] * 6]


@pytest.mark.parametrize("block", [0, 1, 2])
def test_all_batches_of_a_cancelled_step_come_again(pair: Pair, block: int) -> None:
    given: list[int] = []
    waiting: list[list[int]] = []
    cancelled = False
    for places in handed_out(pair):
        given.append(places[0])
        overtaken = not cancelled and len(given) == block + 1
        if pair.compute(torch.tensor(places), accumulate=len(waiting) < 2, overtaken=overtaken):
            assert next(pair.own.model.parameters()).grad is None
            waiting, cancelled = [], True
            continue
        waiting = [*waiting, places] if len(waiting) < 2 else []
    assert cancelled
    assert given == [*[0, 2, 4][: block + 1], 0, 2, 4, 6, 8, 10]
    assert [commit.examples for commit in pair.cluster.host.commits] == [0, 6, 6]


def test_a_step_is_cancelled_between_two_of_its_batches(pair: Pair) -> None:
    batches = handed_out(pair)
    pair.compute(torch.tensor(next(batches)), accumulate=True)
    pair.overtake()
    assert next(batches) == [0, 1], "the first again, as the first of a new step"
    assert next(pair.own.model.parameters()).grad is None


def test_an_update_whose_last_batches_are_not_there_is_not_made(pair: Pair) -> None:
    """What it had comes again; the loop then decides what to do with it."""
    given = []
    for number, places in enumerate(handed_out(pair, 5)):
        given.append(places[0])
        pair.compute(torch.tensor(places), accumulate=number in (0, 2))
    assert given == [0, 5, 10, 10]
    assert [commit.examples for commit in pair.cluster.host.commits] == [10, 2]


# Data of one's own ------------------------------------------------------------------------------------------


def own_batches(size: int) -> list[Tensor]:
    return list(torch.arange(COUNT).view(-1, size))


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.arange(COUNT)


@pytest.mark.parametrize("source", [own_batches(4), DataLoader(Stream(), 4)], ids=["list", "loader"])
def test_a_batch_of_ones_own_comes_again(pair: Pair, source: Any) -> None:
    given, epochs = [], []
    for places in pair.session.batches(source, epochs=2):
        given.append(int(places[0]))
        epochs.append(pair.session.epoch)
        assert pair.compute(places, overtaken=len(given) == 2) == (len(given) == 2)
    assert given == [0, 4, 4, 8, 0, 4, 8]
    assert epochs == [0, 0, 0, 0, 1, 1, 1]
    assert pair.session.epoch == 2


def test_all_of_ones_own_batches_of_a_cancelled_step_come_again(pair: Pair) -> None:
    source = own_batches(3)
    given, waiting = [], 0
    for places in pair.session.batches(source, epochs=1):
        given.append(int(places[0]))
        cancelled = pair.compute(places, accumulate=waiting == 0, overtaken=len(given) == 4)
        assert cancelled == (len(given) == 4)
        waiting = 0 if cancelled else (waiting + 1) % 2
    assert given == [0, 3, 6, 9, 6, 9]


def test_steps_without_batches(pair: Pair) -> None:
    for number in range(3):
        with pair.session.step(examples=4) as step:
            torch.autograd.backward(pair.own.model(torch.arange(4)).mean())
        assert not step.cancelled
        pair.cluster.until(lambda number=number: len(pair.cluster.host.commits) == number + 1)  # type: ignore[misc]
    assert [commit.examples for commit in pair.cluster.host.commits] == [4, 4, 4]


# Between ----------------------------------------------------------------------------------------------------


def value_of(train_state: TrainState) -> list[float]:
    return cast(Seen, train_state.model).seen.tolist()


@pytest.mark.parametrize("own", [True, False])
def test_refresh_gives_the_newest_parameters(pair: Pair, own: bool) -> None:
    batches = pair.session.batches(own_batches(6) if own else samples(COUNT), None if own else 6, epochs=1)
    next(batches)
    pair.compute(torch.arange(6))
    for version in (2, 3):
        pair.advance()
        pair.session.refresh()
        assert pair.session.steps == version
        assert value_of(pair.own) == value_of(pair.cluster.train_state)
    assert len(list(batches)) == 1, "what was given up comes again"


def test_refresh_before_anything(pair: Pair) -> None:
    pair.session.refresh()
    assert value_of(pair.own) == value_of(pair.cluster.train_state)
    assert train(pair.session, pair.own.model, samples(COUNT), batch_size=4, epochs=1) == [False] * 3


def test_refresh_does_not_come_between_a_batch_and_its_step(pair: Pair) -> None:
    """The batch would be handed out again, and used twice."""
    batches = handed_out(pair)
    next(batches)
    with pytest.raises(UsageError, match="between a batch and its step"):
        pair.session.refresh()
    pair.compute(torch.arange(2), accumulate=True)
    with pytest.raises(UsageError, match="between a batch and its step"):
        pair.session.refresh()


def test_an_evaluation_does_not_take_the_sessions_batches(pair: Pair) -> None:
    train(pair.session, pair.own.model, samples(COUNT), batch_size=4, epochs=1)
    with pytest.raises(UsageError, match=r"12 samples in batches of 4, now 5 in batches of 5.*a plain DataLoader"):
        pair.session.batches(samples(5), 5)
    assert train(pair.session, pair.own.model, samples(COUNT), batch_size=4, epochs=2) == [False] * 3


def test_an_epoch_that_is_broken_off_goes_on(pair: Pair) -> None:
    """A batch without a step is not used; an answer to what was asked before is not taken for another."""
    for places in handed_out(pair):
        if places[0] == 4:
            break
        pair.compute(torch.tensor(places))
    given = []
    for places in handed_out(pair, epochs=2):
        given.append(places[0])
        pair.compute(torch.tensor(places))
    assert given == [4, 6, 8, 10, 0, 2, 4, 6, 8, 10]
    assert times_used(pair.cluster) == [2.0] * COUNT


@pytest.mark.parametrize("last", [3, 6])
def test_an_epoch_that_is_broken_off_after_a_step(pair: Pair, last: int) -> None:
    """After the last of them too, when the end of the epoch is on its way."""
    for number, places in enumerate(handed_out(pair), 1):
        pair.compute(torch.tensor(places))
        if number == last:
            break
    with pair.session.step(examples=1):  # on data of one's own: it uses no batch
        torch.autograd.backward(pair.own.model(torch.tensor([0])).mean() * 0)
    for places in handed_out(pair, epochs=2):
        pair.compute(torch.tensor(places))
    assert times_used(pair.cluster) == [2.0] * COUNT


def test_a_batch_that_is_passed_over_is_used(pair: Pair) -> None:
    given = []
    for places in handed_out(pair):
        given.append(places[0])
        if places[0] != 4:
            pair.compute(torch.tensor(places))
    assert given == [0, 2, 4, 6, 8, 10]
    assert times_used(pair.cluster) == [1.0] * 4 + [0.0] * 2 + [1.0] * 6
