"""Training without a server on the virtual clock: every worker has a replica of its own, and exchanges real tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.errors import UsageError
from paceline.optim import make_optimizer
from paceline.peers.connect import EXCHANGES
from paceline.problems import Metric, Problem
from paceline.seeding import derive_seed, seed_streams
from paceline.sessions.join import join
from paceline.sessions.session import Session
from paceline.virtual.peers_clock import PeersClock
from paceline.virtual.peers_group import Meeting, VirtualGroup
from paceline.virtual.plan import Curve, TrainingOutcome, TrainingPlan
from paceline.virtual.scenario import BACKWARD, Scenario
from paceline.virtual.simulate import check_length, summary
from paceline.virtual.turns import Turns

_ENDLESS = 2**31  # epochs
_LAYERS, _LAYER_SIZE = 64, 256  # of a stand-in; beside them the few numbers that an exchange adds do not matter


class PeersTraining(PeersClock):
    """A training plan on virtual workers under a policy of peers; ``outcome`` gives the results so far at any time.

    Workers are threads that take turns. Each has the session, the exchange and the batches that it would have on a
    machine of its own; only its process group is virtual. A step advances a worker's clock by a drawn time: a third in
    forward, the rest as gradients come in backward. Messages advance it by what they cost.
    """

    def __init__(
        self, scenario: Scenario, plan: TrainingPlan, *, commits: int | None = None, seconds: float = math.inf
    ) -> None:
        check_length(commits, seconds)
        scenario.check_replicas()
        self._scenario, self._plan = scenario, plan
        self.model = self._make_model()  # of worker 0
        if isinstance(self._make_optimizer(self.model), torch.optim.LBFGS):
            raise UsageError("LBFGS evaluates a loss several times in a step, and a step has one time here; use sgd")
        trained = sum(parameter.nbytes for parameter in self.model.parameters() if parameter.requires_grad)
        super().__init__(scenario, examples=plan.batch, scale=self._scale(trained))
        self._turns = Turns(scenario.workers)
        self._meeting = Meeting(self.network, self._turns)
        self._curve = Curve(plan.problem, plan.times(seconds if commits is None else commits))
        self._looks_before = -math.inf  # the curve is to be known up to this time
        self._looking = False  # it is not
        self._step_examples = -1  # of all workers in the step under way; before the first none
        self._step_loss = 0.0  # the sum over these
        self._commits = commits
        self.seconds = seconds
        self._stop: Sequence[object] = ()
        self._ending = False

    def finish(self, stop: Sequence[object] = ()) -> None:
        """Run the clock to its end, or until ``stop`` is not empty; once only."""
        self._stop = stop
        self._turns.run(self._work)

    def outcome(self) -> TrainingOutcome:
        """The results so far."""
        return TrainingOutcome(run=summary(self._scenario, self), curve=tuple(self._curve.points))

    def _scale(self, trained: int) -> float:
        """How much larger the messages are than those of a model of this many trained bytes."""
        return self._scenario.nbytes / trained if self._scenario.nbytes else 1.0

    # One worker -------------------------------------------------------------------------------------------

    def _make_model(self) -> nn.Module:
        seed_streams(derive_seed(self._scenario.seed, "model"))
        return self._plan.problem.make_model()

    def _make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return make_optimizer(self._plan.optimizer or self._plan.problem.recipe.optimizer, model.parameters())

    def _work(self, rank: int) -> None:
        plan, scenario = self._plan, self._scenario
        model = self.model if rank == 0 else self._make_model()
        optimizer = self._make_optimizer(model)
        scheduler = plan.make_scheduler(optimizer, scenario.workers)
        backward = _BackwardClock(model, self, rank)  # before the exchange, whose hooks see its time
        group = VirtualGroup(self._meeting, rank)
        with join(
            model,
            optimizer,
            policy=scenario.policy,
            codec=plan.codec,
            scheduler=() if scheduler is None else scheduler,
            seed=scenario.seed,
            on_nan="ignore",
            group=group,
        ) as session:
            for inputs, targets in session.batches(plan.problem.train, plan.batch, epochs=_ENDLESS):
                self._turns.meet(rank, self._commit)
                self._look(rank, session)
                if self._ending:
                    break
                backward.begin()
                with group.taking_time():
                    self._step(session, model, inputs, targets, backward)

    def _step(
        self, session: Session, model: nn.Module, inputs: Tensor, targets: Tensor, backward: _BackwardClock
    ) -> None:
        with session.step() as step:
            loss = self._plan.problem.batch_loss(model, inputs, targets, worker=session.rank)
            step.record(loss=loss)
            torch.autograd.backward(loss)
            backward.end()
        self._step_examples += step.examples or 0
        self._step_loss += float(loss.detach()) * (step.examples or 0)

    def _look(self, rank: int, session: Session) -> None:
        """Evaluate the run's answer, which all workers make together, at no cost."""
        if self._looking:
            with session.averaged():
                if rank == 0:
                    made = len(self.tally.commit_times)
                    now = None if self._commits is None else self.now
                    self._curve.look(self.model, made, self._looks_before, now)

    # All workers ------------------------------------------------------------------------------------------

    def _commit(self) -> None:
        """All workers have made the step: count it, draw the times of the next, and decide whether to go on."""
        if self._step_examples >= 0:
            self.loss = self._step_loss / max(1, self._step_examples)
            self.end(self._step_examples)
        self._step_examples, self._step_loss = 0, 0.0
        made = len(self.tally.commit_times)
        self._ending = self.over or bool(self._stop) or made == self._commits
        if not self._ending:
            self.begin()
            self._ending = self.over
        # The next commit comes when the last worker has computed, or later by its messages.
        following = float(self.ends.max()) if self._commits is None else made + 1
        self._looks_before = math.inf if self.over else following
        self._looking = not self._stop and self._curve.due(self._looks_before)


class ExchangeTimes(PeersTraining):
    """The times of a policy's exchange, run on a small model that stands in for one of the scenario's bytes."""

    def __init__(self, scenario: Scenario) -> None:
        policy = scenario.check(has_loss=False)
        if type(policy) not in EXCHANGES:
            raise UsageError(f"policy {policy} cannot be simulated: paceline.peers.connect has no exchange for it")
        super().__init__(scenario, TrainingPlan(problem=_stand_in(scenario.workers), batch_size=1), commits=1)
        self.examples = scenario.worker_examples

    def run(self, *, commits: int | None = None, seconds: float = math.inf, stop: Sequence[object] = ()) -> None:
        """Run the clock until it has made ``commits``, reached ``seconds``, or ``stop`` is not empty; once only."""
        self._commits, self.seconds = commits, seconds
        self.finish(stop)

    def end(self, examples: int) -> None:
        super().end(examples * self.examples)

    def _scale(self, trained: int) -> float:
        return self._scenario.nbytes / trained


class _Layers(nn.Module):
    """Layers of equal size that compute next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.zeros(_LAYER_SIZE) for _ in range(_LAYERS))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.stack(list(self.layers)).sum() + inputs.sum()


def _stand_in(examples: int) -> Problem:
    data = TensorDataset(torch.zeros(examples, 1), torch.zeros(examples))
    metric = Metric(name="loss", measure=lambda outputs, _: outputs, higher_is_better=False)
    return Problem(
        name="stand-in", make_model=_Layers, train=data, test=data, loss=lambda outputs, _: outputs, metric=metric
    )


class _BackwardClock:
    """Advances a worker's clock by a step's drawn time while its gradients come, in proportion to their bytes."""

    def __init__(self, model: nn.Module, clock: PeersClock, rank: int) -> None:
        self._clock, self._rank = clock, rank
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._total = sum(parameter.nbytes for parameter in trained)
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._came)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Begin the step."""
        self._missing = self._total
        self._ends = float(self._clock.ends[self._rank])
        self._per_byte = BACKWARD * (self._ends - float(self._clock.network.clocks[self._rank])) / max(1, self._total)

    def end(self) -> None:
        """End it; parameters without a gradient leave time over."""
        self._missing = 0
        self._clock.network.advance(self._rank, self._ends)

    def _came(self, parameter: Tensor) -> None:
        self._missing -= parameter.nbytes
        self._clock.network.advance(self._rank, self._ends - self._per_byte * self._missing)
