"""A driver of server policies that moves when it is told to, and that knows what every worker must be doing."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field

from paceline.policies import ServerPolicy
from paceline.policies.messages import Action, Cancel, Commit, Continue, Drop, Push, Send
from paceline.policies.state import ServerState


@dataclass
class Worker:
    """What a worker itself knows; its steps are the Sends and Continues that it got."""

    incarnation: int
    step: int = -1
    version: int | None = None  # of the parameters that it has
    computing: bool = False
    alive: bool = True


@dataclass
class Hand:
    """Feed a policy by hand: ``hand.push(2)`` gives the actions that worker 2's push brings.

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

    def __post_init__(self) -> None:
        self.state = self.policy.begin(self.num_workers)
        for worker in range(self.num_workers if self.together else 0):
            self.join(worker)
            self.ask(worker)

    def join(self, worker: int, incarnation: int = 0) -> list[Action]:
        self.workers[worker] = Worker(incarnation)
        return self._do(self.policy.joined(self.state, worker, incarnation, self.at))

    def ask(self, worker: int) -> list[Action]:
        self.workers[worker].computing = False
        return self._do(self.policy.asked(self.state, worker, self.at))

    def leave(self, worker: int) -> list[Action]:
        if worker in self.workers:
            self.workers[worker].alive = False
        return self._do(self.policy.left(self.state, worker, self.at))

    def push(self, worker: int, *, loss: float | None = None, examples: int = 1) -> list[Action]:
        """The worker ends its step."""
        mine = self.workers[worker]
        assert mine.computing and mine.version is not None
        mine.computing = False
        return self.deliver(Push(worker, mine.incarnation, mine.step, mine.version, examples, loss))

    def deliver(self, push: Push) -> list[Action]:
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

    def _do(self, actions: object) -> list[Action]:
        assert isinstance(actions, tuple | list)
        for action in actions:
            match action:
                case Commit(pushes, weights):
                    assert len(pushes) == len(weights) > 0
                    self.committed.update(pushes)
                    self.commits.append(action)
                    self.version += 1
                case Send(workers):
                    assert len(set(workers)) == len(workers) > 0
                    for worker in workers:
                        self._begin(worker, self.version)
                case Continue(worker):
                    self._begin(worker, self.workers[worker].version)
                case Cancel(workers, steps):
                    for worker, step in zip(workers, steps, strict=True):
                        its = self.workers[worker]
                        assert its.alive and its.computing and its.step == step
                        its.computing = False
                case Drop(push):
                    self.dropped[push] += 1
        assert self.state.version == self.version
        return list(actions)

    def _begin(self, worker: int, version: int | None) -> None:
        its = self.workers[worker]
        assert its.alive and not its.computing, f"worker {worker} was given two things to do"
        its.step, its.version, its.computing = its.step + 1, version, True
