"""A driver of server policies that moves when it is told to, and that knows what every worker must be doing."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.policies import ServerPolicy
from paceline.policies.messages import Action, Cancel, Commit, Continue, Drop, Push, Send, Work
from paceline.policies.state import ServerState


@dataclass
class Worker:
    """What a worker itself knows."""

    incarnation: int
    step: int | None = None
    version: int | None = None  # of the parameters that it has
    computing: bool = False
    alive: bool = True


@dataclass
class Hand:
    """Feed a policy by hand: ``hand.push(2)`` tells what worker 2's push brings, as in ["commit 0 2", "send 0 2"].

    Actions are carried out and checked against what each worker is doing; whoever is told to do two things at once, or
    is cancelled in a step that it is not on, fails the test.
    """

    policy: ServerPolicy
    num_workers: int
    together: bool = True  # all join and ask at the start
    state: ServerState = field(init=False)
    workers: dict[int, Worker] = field(default_factory=dict)
    version: int = 0
    at: float = 0.0
    sent: Counter[Push] = field(default_factory=Counter)
    committed: Counter[Push] = field(default_factory=Counter)
    dropped: Counter[Push] = field(default_factory=Counter)
    commits: list[Commit] = field(default_factory=list)
    cancelled: list[tuple[int, int]] = field(default_factory=list)  # worker, step
    work: dict[tuple[int, int], Work] = field(default_factory=dict)  # worker and step -> what it is of a round
    empty: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))  # round -> parts
    failed: set[int] = field(default_factory=set)  # rounds in which a step came to nothing
    begun: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))  # worker -> its steps

    def __post_init__(self) -> None:
        self.state = self.policy.begin(self.num_workers)
        for worker in range(self.num_workers if self.together else 0):
            self.join(worker)
            self.ask(worker)

    def join(self, worker: int, incarnation: int = 0) -> list[str]:
        self.workers[worker] = Worker(incarnation)
        return self._do(self.policy.joined(self.state, worker, incarnation, self.at))

    def ask(self, worker: int) -> list[str]:
        self.workers[worker].computing = False
        return self._do(self.policy.asked(self.state, worker, self.at))

    def skip(self, worker: int) -> list[str]:
        """The worker's step comes to nothing."""
        its = self.workers[worker]
        its.computing = False
        assert its.step is not None
        if self.policy.coded:
            self.failed.add(self.work[worker, its.step].round)
        return self._do(self.policy.skipped(self.state, worker, self.at))

    def idle(self, worker: int) -> list[str]:
        """There is no batch for what the worker has to compute."""
        its = self.workers[worker]
        its.computing = False
        assert its.step is not None
        work = self.work[worker, its.step]
        self.empty[work.round] |= {part for part, _ in work.parts}
        return self._do(self.policy.idle(self.state, worker, self.at))

    def leave(self, worker: int) -> list[str]:
        if worker in self.workers:
            self.workers[worker].alive = False
        return self._do(self.policy.left(self.state, worker, self.at))

    def end(self) -> list[str]:
        """Nobody will push any more."""
        return self._do(self.policy.ended(self.state, self.at))

    def push(self, worker: int, *, loss: float | None = None, examples: int = 1) -> list[str]:
        """The worker ends its step."""
        push = self.result_of(worker)._replace(examples=examples, loss=loss)
        self.workers[worker].computing = False
        return self.deliver(push)

    def push_together(self, workers: Sequence[int]) -> list[str]:
        """The workers end their steps, and the policy hears of it at once."""
        pushes = [self.result_of(worker) for worker in workers]
        self.sent.update(pushes)
        for worker in workers:
            self.workers[worker].computing = False
        return self._do(self.policy.pushed_together(self.state, pushes, self.at))

    def result_of(self, worker: int) -> Push:
        """What the worker's step comes to."""
        its = self.workers[worker]
        assert its.computing and its.step is not None and its.version is not None
        return Push(worker, its.incarnation, its.step, its.version)

    def deliver(self, push: Push) -> list[str]:
        """A push arrives, of whatever step."""
        self.sent[push] += 1
        return self._do(self.policy.pushed(self.state, push, self.at))

    def through_json(self) -> None:
        """Save the state and go on with what was saved."""
        self.state = self.policy.restore(json.loads(json.dumps(self.state.as_dict(), allow_nan=False)))

    @property
    def busy(self) -> list[int]:
        return [worker for worker, its in self.workers.items() if its.alive and its.computing]

    @property
    def present(self) -> list[int]:
        return [worker for worker, its in self.workers.items() if its.alive]

    def _do(self, actions: object) -> list[str]:
        assert isinstance(actions, tuple | list)
        for action in actions:
            match action:
                case Commit(pushes, weights):
                    assert len(pushes) == len(weights) > 0
                    self.committed.update(pushes)
                    self.commits.append(action)
                    self.version += 1
                case Send(workers, step, work):
                    assert len(set(workers)) == len(workers) > 0
                    assert len(work) == (len(workers) if self.policy.coded else 0)
                    self.work.update({(worker, step): its for worker, its in zip(workers, work, strict=False)})
                    for worker in workers:
                        self._begin(worker, step, self.version)
                case Continue(worker, step):
                    self._begin(worker, step, self.workers[worker].version)
                case Cancel(workers, steps):
                    for worker, step in zip(workers, steps, strict=True):
                        its = self.workers[worker]
                        assert its.alive and its.computing and its.step == step
                        its.computing = False
                        self.cancelled.append((worker, step))
                case Drop(push):
                    self.dropped[push] += 1
        assert self.state.version == self.version
        return [told(action) for action in actions]

    def _begin(self, worker: int, step: int, version: int | None) -> None:
        its = self.workers[worker]
        assert its.alive and not its.computing, f"worker {worker} was given two things to do"
        assert step not in self.begun[worker], "a step's number came twice"
        self.begun[worker].add(step)
        its.step, its.version, its.computing = step, version, True


def told(action: Action) -> str:
    """The action in short: what it is, and of whom."""
    match action:
        case Commit(pushes, _):
            workers: Sequence[int] = [push.worker for push in pushes]
        case Send(workers, _) | Cancel(workers, _):
            pass
        case Continue(worker, _):
            workers = [worker]
        case Drop(push):
            workers = [push.worker]
    return " ".join([type(action).__name__.lower(), *map(str, workers)])
