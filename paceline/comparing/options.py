"""What to compare, and the checks of it before anything is started."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from paceline.delays.delay import Changed, Delay, Factors, Fails, Slow, parse_delay
from paceline.delays.injected import InjectedDelays, parse_unit
from paceline.errors import UsageError, check_whole
from paceline.policies import PeersPolicy, ServerPolicy, parse_policy
from paceline.policies.sparse import check_for_module
from paceline.problems import Problem
from paceline.training.train import TrainConfig, check_config, load_config_problem, server_pace, training_sampler
from paceline.virtual.scenario import Scenario

ONE_WORKER = "one worker"  # the baseline: the same problem and delays without others
POINTS = 40  # evaluations of each run, about
_ALL = 1_000_000  # checkpoints that stay until they are evaluated


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """What to compare; ``None`` means the value of the problem's recipe."""

    problem: str = "digits"
    policies: tuple[str, ...]
    workers: int = 4
    delay: str | None = None  # added to each step of a real worker; the step of a virtual one
    delay_unit: str | None = None
    seeds: int = 1
    target: float | None = None  # None: the problem's own
    epochs: int | None = None
    optimizer: str | None = None
    batch_size: int | None = None  # of each worker
    codec: str | None = None
    model: str | None = None
    data: str | None = None
    virtual: bool = False

    def __post_init__(self) -> None:
        if not self.policies:
            raise UsageError('no policies to compare; name some, as in --policies "all-reduce" "k-sync(k=3)" "async"')
        check_whole("--workers", self.workers, least=2)
        check_whole("--seeds", self.seeds)
        if self.target is not None and not math.isfinite(self.target):
            raise UsageError(f"--target must be a finite number, got {self.target}")
        if self.delay_unit is not None and self.delay is None and not self.virtual:
            raise UsageError(
                f'--delay-unit goes with --delay, such as --delay "1+exp(0.5)" --delay-unit {self.delay_unit}'
            )
        named = [str(parse_policy(policy)) for policy in self.policies]
        object.__setattr__(self, "policies", tuple(dict.fromkeys(named)))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> CompareOptions:
        """Make the options from the result of ``asdict`` after a round trip through JSON."""
        return cls(**{**values, "policies": tuple(values["policies"])})

    @property
    def arms(self) -> tuple[str, ...]:
        """All that is compared: the baseline, and the policies."""
        return ONE_WORKER, *self.policies

    def workers_of(self, arm: str) -> int:
        """The number of workers of an arm; a policy may want several processes in the place of each."""
        if arm == ONE_WORKER:
            return 1
        policy = parse_policy(arm)
        return self.workers * (policy.processes_per_worker if isinstance(policy, PeersPolicy) else 1)

    def config(self, arm: str, seed: int, run: str | None = None) -> TrainConfig:
        """The configuration of one training."""
        return TrainConfig(
            problem=self.problem,
            model=self.model,
            data=self.data,
            policy="all-reduce" if arm == ONE_WORKER else arm,
            codec=None if arm == ONE_WORKER else self.codec,
            optimizer=self.optimizer,
            batch_size=self.batch_size,
            epochs=self.epochs,
            seed=seed,
            run=run,
            evaluate=False,
            keep=_ALL,
        )

    def updates(self, arm: str, problem: Problem) -> int:
        """The updates of one training; with a server an estimate."""
        config, policy, workers = self.config(arm, 0), parse_policy(self.config(arm, 0).policy), self.workers_of(arm)
        if isinstance(policy, ServerPolicy):
            per_epoch = server_pace(config, problem, policy, workers)[0]
        else:
            per_epoch = training_sampler(config, problem, workers).steps_per_epoch
        return per_epoch * (config.epochs or problem.recipe.epochs)

    def real_delay(self, arm: str) -> tuple[str, float] | None:
        """The delay of an arm's real workers, and its unit in seconds."""
        if self.delay is None:
            return None
        delay = _without_others(parse_delay(self.delay), self.workers_of(arm))
        return str(delay), parse_unit(self.delay_unit or "1s")

    def scenario(self, arm: str, seed: int) -> Scenario:
        """The virtual cluster of one training; a step takes 1 s if no delay is given."""
        delay = _without_others(parse_delay(self.delay or "1"), self.workers_of(arm))
        unit = parse_unit(self.delay_unit or "1s")
        if unit != 1.0:
            scale = Factors(values=(unit,))
            changes = (*delay.changes, scale) if isinstance(delay, Changed) else (scale,)
            delay = Changed(base=delay.base if isinstance(delay, Changed) else delay, changes=changes)  # type: ignore[arg-type]
        return Scenario(policy=self.config(arm, seed).policy, workers=self.workers_of(arm), delay=delay, seed=seed)

    def check(self) -> Problem:
        """Raise what would go wrong before the first step of any training; return the problem."""
        problem = load_config_problem(self.config(ONE_WORKER, 0))
        if self.target is None and problem.target is None:
            raise UsageError(f"problem {problem.name} has no target of its own; give one, as in --target 0.9")
        if self.delay is not None:
            parse_delay(self.delay).check_workers(self.workers)
        for arm in self.arms:
            if not self.virtual and (delay := self.real_delay(arm)) is not None:
                InjectedDelays(*delay, seed=0, worker=0)  # refuses delays that only virtual workers can have
            config, workers = self.config(arm, 0), self.workers_of(arm)
            policy = parse_policy(config.policy)
            check_for_module(policy)
            if isinstance(policy, PeersPolicy):
                policy.check_processes(workers)
            check_config(config, problem, workers)
            if self.virtual:
                self.scenario(arm, 0).check_training()
        return problem


def _without_others(delay: Delay, workers: int) -> Delay:
    """The delay without what it says of workers that are not there."""
    if not isinstance(delay, Changed):
        return delay
    changes = [each for each in delay.changes if not (isinstance(each, Slow | Fails) and each.worker >= workers)]
    return dataclasses.replace(delay, changes=tuple(changes)) if changes else delay.base
