"""Workers that do not do the same are told so: no average is wrong in silence, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import World
from failing import Fails, Mistake
from joined_batch import backward, momentum, peers_of
from quick import over_one_backend
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import CommError, PacelineError, UsageError
from paceline.peers.connect import begin_exchange
from paceline.peers.exchange import BackwardPass
from paceline.policies import AllReduce

TIMEOUT = 2.0  # of the groups: what a worker waits for another that will never come
STEPS = 6


def two_layers() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity(), nn.Linear(2, 2))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    return model


def plain_step(model: nn.Module, session: paceline.Session, batch: Tensor) -> None:
    with session.step():
        backward(model(batch).square().mean())


Odd = Callable[[nn.Module, paceline.Session, Tensor], None]


def accumulates(model: nn.Module, session: paceline.Session, batch: Tensor) -> None:
    with session.step(accumulate=True):
        backward(model(batch).square().mean())


def leaves_out_a_batch(model: nn.Module, session: paceline.Session, batch: Tensor) -> None:
    pass


def fails_before_forward(model: nn.Module, session: paceline.Session, batch: Tensor) -> None:
    with pytest.raises(Mistake), session.step():
        raise Mistake


def fails_after_backward(model: nn.Module, session: paceline.Session, batch: Tensor) -> None:
    with pytest.raises(Mistake), session.step():
        backward(model(batch).square().mean())
        raise Mistake


def fails_in_backward(model: nn.Module, session: paceline.Session, batch: Tensor) -> None:
    assert isinstance(model, nn.Sequential)
    with pytest.raises(Mistake), session.step():
        hidden: Tensor = Fails.apply(model[0](batch))  # type: ignore[no-untyped-call]
        backward(model[2](hidden).square().mean())


def makes_one_more(model: nn.Module, session: paceline.Session, batch: Tensor) -> None:
    plain_step(model, session, batch)
    plain_step(model, session, batch)


def tells_other_examples(model: nn.Module, session: paceline.Session, batch: Tensor) -> None:
    with session.step(examples=5):
        backward(model(batch).square().mean())


ODD: dict[str, Odd] = {
    function.__name__: function
    for function in (
        accumulates,
        leaves_out_a_batch,
        fails_before_forward,
        fails_after_backward,
        fails_in_backward,
        makes_one_more,
        tells_other_examples,
    )
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("odd", "odd_rank", "policy"),
    [(odd, place % 2, ("all-reduce", "all-reduce(bucket_cap_mb=0)")[place // 2 % 2]) for place, odd in enumerate(ODD)],
)
@over_one_backend
def test_what_one_worker_does_otherwise_does_not_pass_in_silence(
    world: World, odd: str, odd_rank: int, policy: str
) -> None:
    """Worker ``odd_rank`` does its third step in its own way; by the end a worker has got an error.

    Until then parameters are the same on all of them after the same number of updates.
    """

    def work(group: Any) -> tuple[bool, dict[int, Tensor]]:
        model = two_layers()
        after = {}
        data = TensorDataset(torch.arange(4.0 * STEPS).reshape(-1, 2) / 10)
        session = paceline.join(model, momentum(model), policy=policy, group=group)
        try:
            for number, (batch,) in enumerate(session.batches(data, 1, epochs=1, shuffle=False)):
                (ODD[odd] if (number, session.rank) == (2, odd_rank) else plain_step)(model, session, batch)
                after[session.steps] = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        except PacelineError as error:
            assert isinstance(error, CommError), error
            return True, after
        finally:
            session.close()
        return False, after

    (first_told, first), (second_told, second) = world(2, work, timeout=TIMEOUT)
    assert first_told or second_told
    for step in first.keys() & second.keys():
        assert torch.equal(first[step], second[step]), f"after {step} updates"


@over_one_backend
def test_a_failing_forward_passes_through_unchanged(world: World) -> None:
    mistake = Mistake("the user's own")

    def work(group: Any) -> str:
        model = two_layers()
        session = paceline.join(model, momentum(model), group=group)
        before = [parameter.clone() for parameter in model.parameters()]
        try:
            with session.step():
                if session.rank == 1:
                    raise mistake
                backward(model(torch.ones(1, 2)).sum())
        except Mistake as error:
            assert error is mistake
            return "mistake"
        except CommError as error:
            assert str(error).startswith("worker 0 of 2 lost contact while averaging gradients")
            return "told"
        finally:
            session.close()
            assert all(map(torch.equal, before, model.parameters()))
        return "nothing"

    assert world(2, work, timeout=TIMEOUT) == ["told", "mistake"]


@pytest.mark.usefixtures("overlapping")
@over_one_backend
def test_after_half_an_exchange_the_next_step_is_refused_again_and_again(world: World) -> None:
    def work(group: Any) -> list[str]:
        model = two_layers()
        session = paceline.join(model, momentum(model), policy="all-reduce(bucket_cap_mb=0)", group=group)
        said = []
        if session.rank == 1:
            fails_in_backward(model, session, torch.ones(1, 2))
            for _ in range(2):
                with pytest.raises(CommError, match="resume it from its last checkpoint") as caught:
                    plain_step(model, session, torch.ones(1, 2))
                said.append(str(caught.value))
        return said

    _, said = world(2, work, timeout=TIMEOUT)
    assert len(set(said)) == 1


@over_one_backend
def test_an_exchange_that_failed_at_its_end_is_not_begun_again(world: World) -> None:
    """The other worker is gone, and this one had no backward pass: the error comes from leaving the block."""

    def work(group: Any) -> None:
        model = two_layers()
        session = paceline.join(model, momentum(model), group=group)
        if session.rank == 1:
            return
        with pytest.raises(CommError, match="lost contact"), session.step():
            pass
        with pytest.raises(CommError, match="resume it from its last checkpoint"):
            plain_step(model, session, torch.ones(1, 2))

    world(2, work, timeout=TIMEOUT)


@over_one_backend
def test_freezing_on_one_worker_only_is_an_error(world: World) -> None:
    def work(group: Any) -> bool:
        model = two_layers()
        session = paceline.join(model, momentum(model), group=group)
        try:
            for number in range(4):
                if (number, session.rank) == (2, 1):
                    model[0].requires_grad_(False)
                plain_step(model, session, torch.ones(1, 2))
        except CommError:
            return True
        return False

    assert True in world(2, work, timeout=TIMEOUT)


@over_one_backend
def test_another_total_on_one_worker_is_an_error(world: World) -> None:
    """Totals come from the data; if they differ, so do the data, or the steps."""

    def work(group: Any) -> bool:
        model = two_layers()
        exchange = begin_exchange(model, AllReduce(), peers_of(group))
        exchange.begin(BackwardPass(examples=2, total=4 + group.rank()))
        try:
            backward(model(torch.ones(1, 2)).sum())
            exchange.finish()
        except CommError:
            return True
        return False

    assert world(2, work, timeout=TIMEOUT) == [True, True]


@pytest.mark.parametrize("examples", [-1, 0.5, float("nan")])
def test_numbers_of_examples_that_are_none_are_refused(world: World, examples: Any) -> None:
    def work(group: Any) -> None:
        model = two_layers()
        session = paceline.join(model, momentum(model), group=group)
        with session, pytest.raises(UsageError, match="examples"), session.step(examples=examples):
            backward(model(torch.ones(1, 2)).sum())

    world(2, work)


def test_a_session_that_was_closed_leaves_the_model_to_the_next(world: World) -> None:
    def work(group: Any) -> Tensor:
        model = two_layers()
        for _ in range(3):
            with paceline.join(model, momentum(model), group=group) as session:
                plain_step(model, session, torch.full((1, 2), 1.0 + session.rank))
        model.zero_grad()
        backward(model(torch.ones(1, 2)).sum() * group.rank())
        gradient = next(model.parameters()).grad
        assert gradient is not None
        assert bool(gradient.any()) == (group.rank() == 1)  # nobody averages any more
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    first, second = world(2, work)
    assert torch.equal(first, second)
