"""Train a sparse problem on threads of this process.

>>> import numpy as np
>>> from paceline.hogwild.problems import CSR, LinearProblem
>>> rows = CSR(np.array([0, 1, 2]), np.array([0, 1]), np.array([1.0, 2.0]), columns=2)
>>> engine = Engine(LinearProblem(rows, np.array([1.0, -1.0])), "serial", seed=0, rate=0.5)
>>> engine.run().updates, engine.position, engine.parameters["coef"].tolist()
(2, (1, 0), [0.5, -1.0])
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UsageError, check_whole
from paceline.hogwild.orders import Orders
from paceline.hogwild.problems import Problem
from paceline.hogwild.thread_choice import fastest_threads
from paceline.policies import (
    Atomic,
    Average,
    Cyclades,
    Hogwild,
    Locked,
    Policy,
    RoundRobin,
    Serial,
    SparsePolicy,
    parse_policy,
)

# In the order of the compiled engine's numbers.
SCHEMES: tuple[type[SparsePolicy], ...] = (Serial, Hogwild, Atomic, Locked, RoundRobin, Average, Cyclades)


class Report(NamedTuple):
    """What a run of the engine did."""

    updates: int
    seconds: float
    sampled: int  # stores that were watched (hogwild)
    lost: int  # of them, those that overwrote another thread's
    overwritten: float  # the sum of what they overwrote
    threads: int
    rounds: int  # of the threads (cyclades)
    waited: int  # updates that waited for other threads of their round (cyclades)

    @property
    def updates_per_second(self) -> float:
        return self.updates / self.seconds if self.seconds > 0 else math.inf

    @property
    def lost_rate(self) -> float:
        """The share of stores that overwrote another thread's."""
        return self.lost / self.sampled if self.sampled else 0.0


class Judged(NamedTuple):
    """How good parameters are on a problem."""

    objective: float
    error: float  # wrong signs, RMSE, or the cut of the nearest labels


class Engine:
    """Trains one problem under one policy; ``run()`` makes the updates of an epoch.

    The rate is constant in an epoch and multiplied by ``decay`` after it. ``watch`` is how often the stores of
    ``hogwild`` are watched for lost updates: in one of so many updates; 0 is never. ``delay`` makes each gradient take
    so many seconds more, for experiments.
    """

    def __init__(
        self,
        problem: Problem,
        policy: str | Policy,
        *,
        seed: int,
        rate: float,
        decay: float = 0.9,
        watch: int = 64,
        delay: float = 0.0,
    ) -> None:
        self.problem = problem
        self.policy = sparse_policy(policy)
        self.seed = seed
        for name, value in (("rate", rate), ("decay", decay)):
            if not (math.isfinite(value) and value > 0):
                raise UsageError(f"{name}: wanted a number above 0, got {value}")
        if not (math.isfinite(delay) and delay >= 0):
            raise UsageError(f"delay: wanted seconds of at least 0, got {delay}")
        check_whole("watch", watch, least=0)
        self._rate, self._decay, self._watch, self._delay = rate, decay, watch, delay
        self._native = problem.native
        self._orders = Orders(problem.items, seed)
        self._storage = problem.storage(seed)
        self._addresses = self._storage.addresses
        self._outcome = np.zeros(6)  # of the last run; the compiled engine writes there
        self._outcome_address = self._outcome.ctypes.data
        self._scheme = SCHEMES.index(type(self.policy))
        self._batch = getattr(self.policy, "batch", 0)
        self._position = (0, 0)
        self._threads = getattr(self.policy, "threads", 1)

    @property
    def parameters(self) -> dict[str, NDArray[Any]]:
        """The parameters by name, as views: what is written there is what training goes on from."""
        return self._storage.parts

    @parameters.setter
    def parameters(self, values: Mapping[str, NDArray[Any]]) -> None:
        for name, part in self._storage.parts.items():
            if name not in values or values[name].shape != part.shape:
                found = f"shape {values[name].shape}" if name in values else "none"
                raise UsageError(f"parameters: wanted {name!r} of shape {part.shape}, got {found}")
            part[...] = values[name]

    @property
    def position(self) -> tuple[int, int]:
        """The epoch, the first being 0, and the updates that were made in it."""
        return self._position

    @position.setter
    def position(self, position: tuple[int, int]) -> None:
        epoch, made = position
        check_whole("epoch", epoch, least=0)
        if not 0 <= made <= self.problem.items:
            raise UsageError(f"position: wanted at most {self.problem.items} updates of an epoch, got {made}")
        self._position = (epoch, made)

    @property
    def rate(self) -> float:
        """The step size of the present epoch."""
        return self._rate * self._decay ** self._position[0]

    @property
    def threads(self) -> int:
        """The number of threads; measured on first use if the policy leaves it open."""
        if self._threads == 0:
            self._threads = fastest_threads(self.problem.items, self._trial)
        return self._threads

    def run(self, updates: int | None = None, *, stop: Callable[[], bool] | None = None) -> Report:
        """Make the rest of the present epoch's updates, or so many of them.

        If a signal's handler raises, or ``stop`` returns true, the engine stops within a second, and ``position`` tells
        what was done. ``average`` averages its copies whenever a run ends: other parts of an epoch give other bits.
        """
        epoch, made = self._position
        end = self.problem.items if updates is None else min(self.problem.items, made + updates)
        if updates is not None:
            check_whole("updates", updates, least=0)
        threads = self.threads
        outcome = self._outcome
        outcome[0] = 0
        start = time.perf_counter()
        try:
            self._call(self._addresses, self._orders.take(epoch), made, end, threads, self._outcome_address, stop)
        finally:
            made += int(outcome[0])
            self._position = (epoch, made) if made < self.problem.items else (epoch + 1, 0)
        return _report(outcome, time.perf_counter() - start, threads)

    def _call(
        self,
        addresses: tuple[int, ...],
        order: NDArray[np.uint32],
        start: int,
        end: int,
        threads: int,
        outcome_address: int,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        self._native.run(
            addresses,
            self._scheme,
            threads,
            self._batch,
            self._watch,
            self.rate,
            self._position[0],
            self._delay,
            order.ctypes.data,
            start,
            end,
            outcome_address,
            stop,
        )

    def _trial(self, threads: int, updates: int) -> float:
        """The seconds that so many updates take, on parameters that are thrown away."""
        storage = self.problem.storage(self.seed)
        order = self._orders.take(self._position[0])
        start = time.perf_counter()
        self._call(storage.addresses, order, 0, min(updates, self.problem.items), threads, self._outcome_address)
        return time.perf_counter() - start

    def judge(self, problem: Problem | None = None) -> Judged:
        """The whole objective and the error of the present parameters, also on another problem of the same shape."""
        problem = self.problem if problem is None else problem
        if problem is not self.problem:
            self._check_alike(problem)
        loss, error = problem.native.judge(self._addresses, len(os.sched_getaffinity(0)))
        return Judged(problem.objective(loss, self.parameters), problem.error(error))

    def _check_alike(self, problem: Problem) -> None:
        like = problem.storage(0).parts
        if type(problem) is not type(self.problem) or any(
            name not in like or part.shape != like[name].shape or part.dtype != like[name].dtype
            for name, part in self.parameters.items()
        ):
            raise UsageError("wanted a problem whose parameters have the names, shapes and types of the engine's own")

    def objective(self, problem: Problem | None = None) -> float:
        """The whole objective of the present parameters."""
        return self.judge(problem).objective

    def error(self, problem: Problem | None = None) -> float:
        """The share of wrong signs, the RMSE, or the cut of the nearest labels."""
        return self.judge(problem).error


def sparse_policy(policy: str | Policy) -> SparsePolicy:
    """The policy, or an error if it is none for sparse problems."""
    parsed = parse_policy(policy)
    if not isinstance(parsed, SparsePolicy):
        known = ", ".join(scheme.name for scheme in SCHEMES)
        raise UsageError(f"policy {parsed.name!r} is not one of a sparse problem; use one of {known}")
    if isinstance(parsed, Hogwild) and parsed.record:
        raise UsageError(f"policy {parsed}: only runs of a module are recorded; use cyclades, which repeats to the bit")
    return parsed


def _report(outcome: NDArray[np.float64], seconds: float, threads: int) -> Report:
    updates, sampled, lost, overwritten, rounds, waited = outcome.tolist()
    return Report(int(updates), seconds, int(sampled), int(lost), overwritten, threads, int(rounds), int(waited))
