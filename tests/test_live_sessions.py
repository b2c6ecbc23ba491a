"""A session under a live server whose steps another worker, led by hand, cancels or lets be."""

from __future__ import annotations

import contextlib
import select
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from led_by_hand import Hand
from live import Cluster
from same_bits import assert_same
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from paceline.errors import NonFiniteLossError, PacelineError, UsageError
from paceline.sessions.worker import WorkerSession
from paceline.train_state import TrainState

DATA = TensorDataset(torch.randn(12, 4, generator=torch.Generator().manual_seed(1)), torch.arange(12.0))


class Normed(nn.Sequential):
    """A model whose forward pass changes buffers, in modules before and behind."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 1))


def train_state() -> TrainState:
    model = Normed()
    return TrainState(model=model, optimizers=[SGD(model.parameters(), lr=0.1)])


class Pair:
    """A session, and a hand that overtakes its steps."""

    def __init__(self, cluster: Cluster, **options: Any) -> None:
        self.cluster = cluster
        self.hand = Hand(cluster, 1, model=Normed())
        self.own = train_state()
        self.model = self.own.model
        self.session: WorkerSession = cluster.session(self.own, 0, **options)

    def overtake(self) -> None:
        """Have the session's step cancelled: when this returns, the session can know."""
        self.hand.ask()
        self.hand.push(*[0.0] * 6)
        self.hand.go()
        line = self.session._client._connection
        assert line is not None
        poll = select.poll()  # select.select refuses descriptors above 1023
        poll.register(line, select.POLLIN)
        assert poll.poll(5000), "the later step does not come"

    def loss(self, inputs: Tensor) -> Tensor:
        loss: Tensor = self.model(inputs).square().mean()
        return loss

    def gradients(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self.model.parameters()]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Cluster("k-sync(k=1)", train_state()) as cluster:
        pair = Pair(cluster)
        with pair.session:
            yield pair


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def backward(loss: Tensor) -> None:
    torch.autograd.backward(loss)


def before_forward(pair: Pair, inputs: Tensor) -> None:
    pair.overtake()
    pair.loss(inputs)
    raise AssertionError("a cancelled step goes on")


def between_two_passes(pair: Pair, inputs: Tensor) -> None:
    backward(pair.loss(inputs))
    pair.overtake()
    pair.loss(inputs)
    raise AssertionError("a cancelled step goes on")


def before_backward(pair: Pair, inputs: Tensor) -> None:
    loss = pair.loss(inputs)
    pair.overtake()
    backward(loss)
    raise AssertionError("a cancelled step goes on")


def at_the_end(pair: Pair, inputs: Tensor) -> None:
    backward(pair.loss(inputs))
    pair.overtake()


def swallowing(pair: Pair, inputs: Tensor) -> None:
    """What is no good style: the session finds out at the end."""
    pair.overtake()
    with contextlib.suppress(BaseException):
        backward(pair.loss(inputs))


@pytest.mark.parametrize("body", [before_forward, between_two_passes, before_backward, at_the_end, swallowing])
def test_a_cancelled_step_leaves_no_trace(pair: Pair, body: Callable[[Pair, Tensor], None]) -> None:
    batches = pair.session.batches(DATA, 4, epochs=1, shuffle=False)
    inputs, _ = next(batches)
    with pair.session.step() as step:
        before = buffers(pair.model)
        body(pair, inputs)
    assert step.cancelled and not step.skipped
    assert pair.gradients() == [None] * 6
    assert_same(buffers(pair.model), before)
    with pair.session.step() as step:  # of the step that has come instead
        backward(pair.loss(inputs))
    assert not step.cancelled
    pair.cluster.until(lambda: pair.cluster.server.figures()[0]["pushes"] == 1)


def test_a_batch_of_a_cancelled_step_comes_again(pair: Pair) -> None:
    seen: list[float] = []
    for inputs, targets in pair.session.batches(DATA, 4, epochs=1, shuffle=False):
        with pair.session.step() as step:
            if not seen:
                pair.overtake()
            backward(pair.loss(inputs))
        seen.append(float(targets[0]))
        assert step.cancelled == (len(seen) == 1)
    assert seen == [0.0, 0.0, 4.0, 8.0]


def test_an_exception_passes_and_nothing_is_pushed(pair: Pair) -> None:
    for number, (inputs, _) in enumerate(pair.session.batches(DATA, 4, epochs=1)):
        if number:
            with pair.session.step():
                backward(pair.loss(inputs))
            continue
        with pytest.raises(ZeroDivisionError), pair.session.step() as step:
            backward(pair.loss(inputs))
            raise ZeroDivisionError
        assert not step.cancelled
    assert pair.cluster.server.figures()[0]["pushes"] == number == 2
    assert pair.cluster.host.commits[-1].version == 2


def test_an_exception_in_a_step_that_is_cancelled_too(pair: Pair) -> None:
    pushed = 0
    for number, (inputs, _) in enumerate(pair.session.batches(DATA, 4, epochs=1)):
        if number == 0:
            with pytest.raises(ZeroDivisionError), pair.session.step():
                pair.overtake()
                raise ZeroDivisionError
            continue
        with pair.session.step() as step:
            backward(pair.loss(inputs))
        pushed += not step.cancelled
    assert pushed >= 3, "the batch had come back when the exception came"


def test_minimize_is_refused(pair: Pair) -> None:
    with pytest.raises(UsageError, match="under k-sync\\(k=1\\) the server updates"):
        pair.session.minimize(lambda: torch.tensor(0.0))


def test_a_step_inside_another(pair: Pair) -> None:
    with pair.session.step(), pytest.raises(UsageError, match="inside another"), pair.session.step():
        pass


@pytest.mark.parametrize("ask", ["save", "refresh"])
def test_what_is_not_for_inside_a_step(pair: Pair, ask: str) -> None:
    with pair.session.step(), pytest.raises(UsageError, match=f"{ask}\\(\\) was called inside a step"):
        getattr(pair.session, ask)()


def test_records_reach_the_metrics_of_the_server(pair: Pair) -> None:
    def recorded() -> list[Any]:
        return [note for note in pair.cluster.host.notes if note[0] != "joined"]

    pair.session.record("evaluation", accuracy=torch.tensor(0.5))
    pair.cluster.until(lambda: bool(recorded()))
    assert recorded() == [("evaluation", {"accuracy": 0.5, "worker": 0})]


def nan_at(pair: Pair, bad: int, **options: Any) -> list[bool]:
    """Train on all batches; the loss of one is NaN, and so are its gradients."""
    skipped = []
    for number, (inputs, _) in enumerate(pair.session.batches(DATA, 4, epochs=1)):
        with pair.session.step(**options) as step:
            loss = pair.loss(inputs) * (torch.nan if number == bad else 1.0)
            step.record(loss=loss)
            backward(loss)
        skipped.append(step.skipped)
    return skipped


def test_a_bad_loss_is_skipped() -> None:
    with Cluster("async", train_state()) as cluster:
        pair = Pair(cluster, on_nan="skip")
        with pair.session:
            assert nan_at(pair, 1) == [False, True, False]
        assert [commit.version for commit in cluster.host.commits] == [1, 2]


def test_a_bad_loss_stops(pair: Pair) -> None:
    with pytest.raises(NonFiniteLossError, match="worker 0, step 1: the loss is nan"):
        nan_at(pair, 1)
    assert len(pair.cluster.host.commits) == 1


def test_a_bad_loss_that_is_ignored_is_left_out_by_the_server() -> None:
    with Cluster("async", train_state()) as cluster:
        pair = Pair(cluster, on_nan="ignore")
        with pair.session:
            nan_at(pair, 1)
            assert pair.session.epoch == 1
        assert cluster.server.figures()[0]["refused"] == 1
        assert [commit.loss is not None for commit in cluster.host.commits] == [True, True]


def test_a_bad_loss_while_accumulating_stops(pair: Pair) -> None:
    with pytest.raises(NonFiniteLossError):
        for number, (inputs, _) in enumerate(pair.session.batches(DATA, 4, epochs=1)):
            with pair.session.step(accumulate=number == 0) as step:
                loss = pair.loss(inputs) * (torch.nan if number == 0 else 1.0)
                step.record(loss=loss)
                backward(loss)
    assert not pair.cluster.host.commits


@pytest.mark.parametrize("enabled", [True, False])
def test_a_grad_scaler(enabled: bool) -> None:
    """Both ends have one, for both run the same script."""

    def scaled() -> TrainState:
        model = nn.Linear(4, 1)
        nn.init.ones_(model.weight)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)
        return TrainState(model=model, optimizers=[SGD(model.parameters(), lr=0.1)], scaler=scaler)

    def expected() -> Tensor:
        model = nn.Linear(4, 1)
        nn.init.ones_(model.weight)
        optimizer = SGD(model.parameters(), lr=0.1)
        for start in (0, 4, 8):
            optimizer.zero_grad()
            backward(model(DATA.tensors[0][start : start + 4]).square().mean())
            optimizer.step()
        return model.weight

    torch.manual_seed(0)
    with Cluster("sync", scaled(), workers=1) as cluster:
        torch.manual_seed(0)
        own = scaled()
        assert own.scaler is not None
        with cluster.session(own, 0) as session:
            for inputs, _ in session.batches(DATA, 4, epochs=1, shuffle=False):
                with session.step():
                    backward(own.scaler.scale(own.model(inputs).square().mean()))
            torch.manual_seed(0)
            torch.testing.assert_close(own.model.weight, expected())


def test_workers_that_wait_for_different_means_are_told_so() -> None:
    """One has used up an epoch, the other is still in it: a mean of both would never be."""
    both = threading.Barrier(2)  # one that is alone has a mean of its own

    def work(session: WorkerSession, own: TrainState) -> None:
        both.wait()
        batches = session.batches(DATA, 12)
        if session.rank == 0:
            for inputs, _ in batches:
                with session.step():
                    torch.autograd.backward(own.model(inputs).mean())
        session.mean(1.0)

    with (
        pytest.raises(PacelineError, match="all workers wait for means, and not for the same one"),
        Cluster("async", train_state()) as cluster,
    ):
        cluster.run([train_state() for _ in range(2)], work)
