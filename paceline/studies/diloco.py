"""DiLoCo against data parallelism over a slow link (Douillard et al., 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.data.sampler import ShardedSampler
from paceline.problems import Problem
from paceline.report.series import Axis, Series
from paceline.schedules import ScheduleConfig
from paceline.studies.arm_study import ArmStudy
from paceline.studies.arms import Arm, Trials
from paceline.studies.checks import check_counts, check_positive
from paceline.studies.intervals import verdict
from paceline.studies.measures import final_loss, megabytes_sent, run_seconds
from paceline.studies.study import Cell, Column, option
from paceline.virtual.simulate import Scenario, simulate

ALONE, EQUAL_STEPS, EQUAL_TIME = "one worker", "all-reduce, equal steps", "all-reduce, equal time"
AVERAGES, NESTEROV, PUBLISHED_NESTEROV = "local SGD", "DiLoCo", "DiLoCo, momentum 0.9"
# Perplexities of a model of 150M parameters on C4, 8 workers, H = 500 (Douillard et al., 2023, table 2).
PUBLISHED = {ALONE: 16.23, EQUAL_STEPS: 15.30, PUBLISHED_NESTEROV: 15.02}


@dataclass(frozen=True, kw_only=True)
class DiLoCoStudy(ArmStudy):
    """Train a language model of characters over a slow link: DiLoCo, local SGD, and all-reduce in equal time or steps.

    DiLoCo should send H times less than all-reduce, end no worse than it in equal time, and better than local SGD,
    which is DiLoCo with plain averages. The last notes say what holds.
    """

    name: ClassVar[str] = "diloco"
    title: ClassVar[str] = "DiLoCo over a slow link"

    problem: str = option("charlm", "What to train on; digits needs no data.")
    model: str | None = option("tiny-gpt", "The network.")
    workers: int = option(4, "Of all but one line.")
    every: int = option(50, "H, steps between two exchanges.")
    steps: int = option(600, "Of every run, but for all-reduce in equal time.")
    batch_size: int = option(4, "Of each worker.")
    rate: float = option(0.01, "Highest learning rate of AdamW, which falls along a cosine.")
    outer_momentum: float = option(0.5, "Of DiLoCo, beside the published 0.9, which suits more rounds.")
    link: str = option("10ms 100kB/s", "Of every worker; a step takes a second.")
    judges: int | None = option(100, "Examples to evaluate on, the first ones.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "workers", "every", "steps")
        check_positive(self, "rate")

    def arms(self, problem: Problem) -> list[Arm]:
        every, outer = self.every, self.outer_momentum
        return [
            self._arm(problem, ALONE, "all-reduce", self.steps, workers=1),
            self._arm(problem, EQUAL_STEPS, "all-reduce", self.steps),
            self._arm(problem, EQUAL_TIME, "all-reduce", self._steps_in_equal_time(problem)),
            self._arm(problem, AVERAGES, f"local-sgd(every={every})", self.steps),
            self._arm(problem, NESTEROV, f"diloco(every={every}, outer_momentum={outer!r})", self.steps),
            self._arm(problem, PUBLISHED_NESTEROV, f"diloco(every={every})", self.steps),
        ]

    def _arm(self, problem: Problem, name: str, policy: str, steps: int, workers: int | None = None) -> Arm:
        workers = workers or self.workers
        num_samples: int = len(problem.train)  # type: ignore[arg-type]  # a Dataset with a length
        epochs = steps / ShardedSampler(num_samples, self.batch_size, world_size=workers).steps_per_epoch
        return Arm(
            name=name,
            group=f"{self.problem}, {self.link}",
            optimizer=f"adamw(lr={self.rate!r})",
            epochs=epochs,
            batch_size=self.batch_size,
            workers=workers,
            policy=policy,
            schedule=ScheduleConfig(warmup="gradual", warmup_epochs=epochs / 20, warmup_start=0.1, decay="cosine"),
            link=self.link,
            points=6,
            judges=self.judges,
        )

    def _steps_in_equal_time(self, problem: Problem) -> int:
        """How many steps all-reduce makes while DiLoCo makes its own."""
        trained = sum(parameter.nbytes for parameter in problem.make_model().parameters() if parameter.requires_grad)
        diloco, all_reduce = (
            Scenario(policy=policy, workers=self.workers, delay="1", link=self.link, nbytes=trained)
            for policy in (f"diloco(every={self.every})", "all-reduce")
        )
        seconds = simulate(diloco, commits=self.steps).seconds
        return max(1, int(seconds / simulate(all_reduce).iteration))

    def columns(self, trials: Trials) -> tuple[Column | str, ...]:
        measured = Column(name="virtual s", decimals=0), "MB sent", "test loss"
        return "algorithm", "workers", "steps", *measured, "published perplexity"

    def axes(self) -> tuple[Axis, Axis]:
        return Axis(label="virtual seconds", scale="log"), Axis(label="test loss")

    def series(self, trials: Trials) -> list[Series]:
        return [trials.curve(arm, lambda point: point.loss, by_time=True) for arm in trials.arms()]

    def row(self, arm: Arm, trials: Trials) -> tuple[Cell, ...]:
        return (
            arm.name,
            arm.workers,
            round(trials.mean(arm, lambda trial: trial.last.commits).mean),
            trials.mean(arm, run_seconds).mean,
            trials.mean(arm, megabytes_sent).mean,
            trials.mean(arm, final_loss).show(3),
            PUBLISHED.get(arm.name),
        )

    def verdicts(self, trials: Trials) -> list[str]:
        arms = {arm.name: arm for arm in trials.arms()}
        claims = [(ALONE, NESTEROV), (EQUAL_TIME, NESTEROV), (AVERAGES, NESTEROV), (EQUAL_STEPS, NESTEROV)]
        found = [
            verdict(f"{better} has a lower test loss than {worse}", differences, "nats", decimals=3)
            for worse, better in claims
            if {worse, better} <= arms.keys()
            and (differences := trials.differences(arms[worse], arms[better], final_loss))
        ]
        if {EQUAL_STEPS, NESTEROV} <= arms.keys():
            often, seldom = (trials.mean(arms[name], megabytes_sent).mean for name in (EQUAL_STEPS, NESTEROV))
            found.append(f"In as many steps DiLoCo sends {often / seldom:.1f} times less than all-reduce.")
        return found

    def notes(self) -> tuple[str, ...]:
        return (
            "After Douillard et al., 2023 (DiLoCo). The published perplexities are of 150M parameters on C4, 8 workers "
            "and H = 500; they compare with data parallelism in as many steps, at a batch 8 times that of one worker.",
            f"{self.problem}, {self.model}, AdamW at {self.rate:g} with a cosine, batches of {self.batch_size} per "
            f"worker, H = {self.every}. DiLoCo has the outer rate 0.7 and Nesterov momentum {self.outer_momentum:g}; "
            "local SGD averages the parameters, which is an outer rate of 1 without momentum. A step takes one virtual "
            f"second, messages what a link of {self.link} makes them take.",
            self.note_on_seeds(),
        )
