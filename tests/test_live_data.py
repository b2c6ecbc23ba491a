"""Loops under a live server in other forms: accumulating, on data of one's own, broken off, evaluating between."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from led_by_hand import Hand, wait_until_read
from ledger import Ledger, Seen, samples, seen_state, times_used, train
from live import DEADLINE, Cluster
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from paceline.errors import NonFiniteLossError, UsageError
from paceline.sessions.worker import WorkerSession
from paceline.train_state import TrainState

COUNT = 12


class Pair:
    """A session, and a hand that overtakes its steps: under k-sync(k=1) any push does."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.hand = Hand(cluster, 1, model=Seen(COUNT))
        self.own = seen_state(COUNT)
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
    with Cluster("k-sync(k=1)", seen_state(COUNT)) as cluster:
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


def test_what_is_accumulated_when_the_batches_end_is_pushed(pair: Pair) -> None:
    given = []
    for number, places in enumerate(handed_out(pair, 5)):
        given.append(places[0])
        pair.compute(torch.tensor(places), accumulate=number in (0, 2))
    assert given == [0, 5, 10]
    assert [commit.examples for commit in pair.cluster.host.commits] == [10, 2]


def test_what_is_accumulated_and_cancelled_when_the_batches_end_comes_again(pair: Pair) -> None:
    batches = handed_out(pair, 6)
    pair.compute(torch.tensor(next(batches)), accumulate=True)
    pair.compute(torch.tensor(next(batches)), accumulate=True)
    pair.overtake()
    given = []
    for places in batches:
        given.append(places[0])
        pair.compute(torch.tensor(places), accumulate=True)
    assert given == [0, 6]
    assert [commit.examples for commit in pair.cluster.host.commits] == [0, 12]


def test_a_bad_loss_that_was_accumulated_when_the_batches_end_stops(pair: Pair) -> None:
    with pytest.raises(NonFiniteLossError):
        for places in handed_out(pair, 6):
            with pair.session.step(accumulate=True) as step:
                step.record(loss=float("nan") if places[0] == 0 else 1.0)
                torch.autograd.backward(pair.own.model(torch.tensor(places)).mean())
    assert pair.cluster.host.commits == []


def test_blocks_that_nobody_pushes_are_told_of(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with pair.session.step(accumulate=True, examples=4):
            torch.autograd.backward(pair.own.model(torch.arange(4)).mean())
    pair.session.close()
    assert "worker 0: 2 accumulated blocks were not pushed; end with a step without accumulate=True" in caplog.text


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return cast(Tensor, self.layer(inputs).square())


@pytest.mark.parametrize("count", [84, 140, 63])  # 3, 2 and no batches of 7 are left after the whole updates
def test_accumulating_workers_under_sync_train_as_one_alone(count: int) -> None:
    """An update of several workers is that of one whose batches are as large as all theirs together."""
    inputs = torch.randn(count, 3, generator=torch.Generator().manual_seed(1))
    template = Squares()

    def train_state() -> TrainState:
        model = copy.deepcopy(template)
        return TrainState(model=model, optimizers=[SGD(model.parameters(), lr=0.05, momentum=0.9)])

    def work(session: WorkerSession, its: TrainState) -> None:
        for _ in session.epochs(2):
            batches = session.batches(TensorDataset(inputs), 7, shuffle=False)
            for number, (batch,) in enumerate(batches):
                with session.step(accumulate=number % 3 != 2):
                    torch.autograd.backward(its.model(batch).mean())

    with Cluster("sync", train_state(), workers=3) as cluster:
        cluster.run([train_state() for _ in range(3)], work)
        alone = train_state()
        for _ in range(2):
            for update in torch.split(inputs, 63):
                alone.clear_gradients()
                for block in torch.split(update, 21):
                    torch.autograd.backward(alone.model(block).mean())
                alone.update()
        examples = [commit.examples for commit in cluster.host.commits]
    assert examples == [len(update) for update in torch.split(inputs, 63)] * 2
    torch.testing.assert_close(cluster.train_state.model.state_dict(), alone.model.state_dict())


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


@pytest.mark.parametrize("overtaken", [False, True])
def test_what_is_accumulated_of_ones_own_batches_when_they_end_is_pushed(pair: Pair, overtaken: bool) -> None:
    """Also what was accumulated in the epoch before; if it is cancelled then, all of it comes again."""
    given: list[int] = []
    for places in pair.session.batches(own_batches(4), epochs=2):
        given.append(int(places[0]))
        pair.compute(places, accumulate=len(given) != 2)
        if overtaken and len(given) == 6:
            pair.overtake()
    assert given == [0, 4, 8, 0, 4, 8] + ([8, 0, 4, 8] if overtaken else [])
    wanted = [8, *([0] if overtaken else []), 16]
    pair.cluster.until(lambda: len(pair.cluster.host.commits) == len(wanted))
    assert [commit.examples for commit in pair.cluster.host.commits] == wanted


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


def test_epochs_that_are_broken_off_are_counted(pair: Pair) -> None:
    epochs = []
    for _ in pair.session.epochs(3):
        for _ in handed_out(pair):
            with pair.session.step():
                torch.autograd.backward(pair.own.model(torch.arange(4)).mean())
            break
        epochs.append(pair.session.epoch)
    assert epochs == [0, 1, 2]


def test_options_of_a_loader_that_have_no_effect_are_named_once(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    loader = DataLoader(samples(COUNT), 6, num_workers=2, pin_memory=True)
    for _ in pair.session.epochs(2):
        train(pair.session, pair.own.model, loader)
    assert [record.getMessage() for record in caplog.records] == [
        "num_workers=2, pin_memory=True, prefetch_factor=2 have no effect under k-sync(k=1): the server says which "
        "batch comes next, and a worker fetches it itself, in its own process; leave them out"
    ]


def collate(rows: list[tuple[Tensor]]) -> list[Tensor]:
    return [torch.stack([place for (place,) in rows])]


@pytest.mark.parametrize("options", [{}, {"num_workers": 0, "collate_fn": collate}])
def test_options_of_a_loader_that_have_an_effect_are_not_named(
    pair: Pair, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    train(pair.session, pair.own.model, samples(COUNT), batch_size=6, epochs=1, **options)
    assert not caplog.records


# Rates ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Detected call of")  # torch misses the step that the server makes
@pytest.mark.parametrize("scheduled", [True, False])
def test_a_rate_that_is_changed_on_a_worker_is_told_of_once(
    pair: Pair, scheduled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = pair.own.optimizers[0]
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5) if scheduled else None
    for places in own_batches(3):
        pair.compute(places)
        if scheduler is not None:
            scheduler.step()
        else:
            optimizer.param_groups[0]["lr"] /= 2
    assert [record.getMessage() for record in caplog.records if record.name == "paceline"] == [
        "step 1: lr of the optimizer was changed from 1.0 to 0.5, which has no effect under k-sync(k=1): the server "
        "updates the parameters, with its own optimizer. Give the scheduler to join(scheduler=...), and do not step it"
    ]


def test_other_settings_of_the_optimizer_are_looked_at_too(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    pair.own.optimizers[0].param_groups[0]["weight_decay"] = 0.1
    pair.compute(torch.arange(3))
    assert "step 0: weight_decay of the optimizer was changed from 0 to 0.1" in caplog.text


def test_a_scheduler_that_the_server_steps_changes_nothing_on_a_worker(caplog: pytest.LogCaptureFixture) -> None:
    def scheduled() -> TrainState:
        train_state = seen_state(COUNT)
        return replace(train_state, schedulers=[StepLR(train_state.optimizers[0], step_size=1, gamma=0.5)])

    with Cluster("async", scheduled(), workers=1) as cluster:
        cluster.run(
            [scheduled()], lambda session, own: train(session, own.model, samples(COUNT), batch_size=3, epochs=1)
        )
        assert cluster.train_state.optimizers[0].param_groups[0]["lr"] == 0.5**4
    assert not caplog.records


def test_a_batch_that_is_passed_over_is_used(pair: Pair) -> None:
    given = []
    for places in handed_out(pair):
        given.append(places[0])
        if places[0] != 4:
            pair.compute(torch.tensor(places))
    assert given == [0, 2, 4, 6, 8, 10]
    assert times_used(pair.cluster) == [1.0] * 4 + [0.0] * 2 + [1.0] * 6
