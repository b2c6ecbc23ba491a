"""Lock-free threads on sparse problems, as in the deck's table and speed-up figure of Hogwild!."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from paceline.hogwild.cuts import round_cut
from paceline.hogwild.engine import SCHEMES, Engine, sparse_policy
from paceline.hogwild.sparsity import Sparsity, sparsity
from paceline.hogwild.tasks import Task
from paceline.report.pictures import Panel
from paceline.report.series import Axis, Series
from paceline.studies.checks import check_counts, check_different, check_positive
from paceline.studies.hogwild_data import PUBLISHED, check_names, load_all, tsukuba_picture
from paceline.studies.intervals import agreement, interval, verdict
from paceline.studies.study import Cell, Column, Study, StudyContext, StudyResult, option
from paceline.threads import one_thread

SERIAL = "serial"
_SEARCH = 200_000_000  # steps in search of rho


@dataclass(frozen=True)
class Arm:
    """A scheme on a number of threads, on a data set."""

    data: str
    scheme: str
    threads: int

    @property
    def policy(self) -> str:
        return self.scheme if self.scheme == SERIAL else f"{self.scheme}(threads={self.threads})"


@dataclass(frozen=True)
class Trial:
    """What one seed gave."""

    seconds: float
    updates: int
    objective: float
    train_error: float
    test_error: float | None
    lost_rate: float | None


Trials = dict[Arm, list[Trial]]  # by seed


@dataclass(frozen=True, kw_only=True)
class HogwildStudy(Study):
    """Train sparse problems by every scheme on one and more threads, and compare times and errors with serial SGD's.

    It measures wall-clock time: run it on an idle machine. More threads than cores measure how they disturb each other.
    Synthetic problems need no data; of real ones those in --data DIR are used (a9a, w8a, rcv1-small, tsukuba).
    """

    name: ClassVar[str] = "hogwild"
    title: ClassVar[str] = "Lock-free threads on sparse problems"

    sets: tuple[str, ...] = option((), "Data sets.  [default: the synthetic ones, and the real ones that are there]")
    schemes: tuple[str, ...] = option(
        tuple(kind.name for kind in SCHEMES), "Policies to compare; serial is always one."
    )
    threads: tuple[int, ...] = option((1, 2), "Numbers of threads.")
    epochs: int = option(20, "Of every run.")
    cut_epochs: int = option(800, "Of the one run that gives the cut in the picture, if there is one.")
    size: float = option(1.0, "Of the synthetic problems, as a multiple of 400,000 rows or 2 million entries.")
    seeds: int = option(3, "Runs of every line.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "epochs", "cut_epochs", "seeds")
        check_positive(self, "size")
        check_different(self, "threads", least=1)
        check_names(self.sets)
        for scheme in self.schemes:
            sparse_policy(Arm("", scheme, 1).policy)

    def run(self, context: StudyContext) -> StudyResult:
        with one_thread():
            tasks = load_all(self.sets, context.data, self.size)
            sparse = {name: sparsity(task.problem, budget=_SEARCH) for name, task in tasks.items()}
            trials, interrupted = self._measure(tasks, context)
            pictures, about = ({}, ()) if interrupted else self._picture(tasks, context.data)
        whole = {arm: found for arm, found in trials.items() if found}
        return StudyResult(
            study=self,
            seed=context.seed,
            columns=_COLUMNS,
            rows=tuple(_row(arm, whole, tasks[arm.data], sparse[arm.data]) for arm in whole),
            x_axis=Axis(label="threads", scale="log"),
            y_axis=Axis(label="speed-up over serial"),
            series=tuple(_series(whole, self.threads)),
            notes=(*self._notes(), *(note for name in tasks for note in _verdicts(name, whole)), *about),
            records=tuple({**asdict(arm), **asdict(trial)} for arm, found in whole.items() for trial in found),
            missing="interrupted: some runs are missing" if interrupted else None,
            interrupted=interrupted,
            pictures=pictures,
        )

    def _arms(self, data: str) -> list[Arm]:
        threaded = [Arm(data, scheme, count) for scheme in self.schemes if scheme != SERIAL for count in self.threads]
        return [Arm(data, SERIAL, 1), *threaded]

    def _measure(self, tasks: dict[str, Task], context: StudyContext) -> tuple[Trials, bool]:
        """Let the schemes take turns, seed by seed, so that a drift of the machine's speed meets all of them."""
        trials: Trials = {arm: [] for name in tasks for arm in self._arms(name)}
        turns = [(arm, seed) for name in tasks for seed in range(self.seeds) for arm in self._arms(name)]
        with context.interrupts.collected() as stop:
            for number, (arm, seed) in enumerate(turns):
                context.tell(f"{arm.data} {arm.policy}", number, len(turns))
                if stop:
                    break
                trials[arm].append(self._trial(arm, tasks[arm.data], context.seed + seed))
        if stop and not any(trials.values()):
            raise KeyboardInterrupt("interrupted before the first run had ended")
        context.tell("done", len(turns), len(turns))
        return trials, bool(stop)

    def _trial(self, arm: Arm, task: Task, seed: int) -> Trial:
        engine = Engine(task.problem, arm.policy, seed=seed, rate=task.rate, decay=task.decay)
        reports = [engine.run() for _ in range(self.epochs)]
        objective, error = engine.judge()
        sampled = sum(report.sampled for report in reports)
        return Trial(
            seconds=sum(report.seconds for report in reports),
            updates=sum(report.updates for report in reports),
            objective=float(objective),
            train_error=float(error),
            test_error=None if task.test is None else float(engine.error(task.test)),
            lost_rate=sum(report.lost for report in reports) / sampled if sampled else None,
        )

    def _picture(
        self, tasks: dict[str, Task], data: Path | None
    ) -> tuple[dict[str, tuple[Panel, ...]], tuple[str, ...]]:
        """Cut the Tsukuba pair with as many epochs as it takes, and draw what came out."""
        task = tasks.get("tsukuba")
        picture = None if data is None or task is None else tsukuba_picture(data)
        if task is None or task.network is None or picture is None:
            return {}, ()
        engine = Engine(task.problem, "hogwild", seed=0, rate=task.rate, decay=task.decay)
        seconds = sum(engine.run().seconds for _ in range(self.cut_epochs))
        value, sides = round_cut(task.network, engine.parameters["x"][:, 0])
        exact, _ = round_cut(task.network, np.concatenate([[1, 0], picture.exact.ravel()]))
        panels = (
            Panel("left picture", picture.seen),
            Panel(f"relaxed and rounded: {value:,.0f}", sides[2:].reshape(picture.exact.shape)),
            Panel(f"exact: {exact:,.0f}", picture.exact),
        )
        note = (
            f"Tsukuba, hogwild, {self.cut_epochs} epochs in {seconds:.1f} s: the relaxed cut, rounded at the best "
            f"threshold, is {value:,.0f}; the smallest cut is {exact:,.0f}, so it is {100 * (value / exact - 1):.2f} % "
            "above it. cut.png shows both."
        )
        return {"cut": panels}, (note,)

    def _notes(self) -> tuple[str, ...]:
        return (
            'After the table and the figure "speed-up" of the lecture on Hogwild! (Niu, Recht, Re and Wright, 2011). '
            "Published times and speed-ups are of 10 cores, 20 epochs and other data of the same kind: "
            + ", ".join(f"{data} for {problem}" for problem, (data, _) in PUBLISHED.items())
            + ".",
            f"{self.epochs} epochs, after each of which the rate is multiplied by 0.9 (cuts: 0.995); {self.seeds} "
            "seeds, +- is half of the 95 % interval. Seconds are wall-clock time of the updates, with cyclades' "
            "preparation: they need an idle machine.",
            "lost: the share of watched stores that overwrote another thread's. slow-down: how many times more updates "
            "the paper's bound asks for, 1 + 6 tau rho + 6 tau^2 Omega Delta^(1/2) with tau threads. The error is the "
            "share of wrong signs, the RMSE, or the cut at the threshold 1/2.",
        )


_COLUMNS = (
    Column(name="data"),
    Column(name="policy"),
    Column(name="threads"),
    Column(name="seconds"),
    Column(name="M updates/s"),
    Column(name="speed-up"),
    Column(name="train error"),
    Column(name="test error"),
    Column(name="lost"),
    Column(name="rho"),
    Column(name="Delta"),
    Column(name="slow-down"),
    Column(name="published"),
)


def _row(arm: Arm, trials: Trials, task: Task, sparse: Sparsity) -> tuple[Cell, ...]:
    found = trials[arm]
    tests = [trial.test_error for trial in found if trial.test_error is not None]
    lost = [trial.lost_rate for trial in found if trial.lost_rate is not None]
    errors = [trial.train_error for trial in found]
    speed_ups = _speed_ups(arm, trials)
    decimals = 0 if task.network is not None else 4
    return (
        arm.data,
        arm.scheme,
        arm.threads,
        interval([trial.seconds for trial in found]).show(3),
        statistics.fmean(trial.updates / trial.seconds / 1e6 for trial in found),
        interval(speed_ups).show() if speed_ups else None,
        interval(errors).show(decimals),
        interval(tests).show(decimals) if tests else None,
        f"{statistics.fmean(lost):.1e}" if lost else None,
        f"{sparse.rho:.1e}",
        f"{sparse.delta:.1e}",
        f"{sparse.predicted_slowdown(arm.threads):.3g}",
        PUBLISHED[task.name][1].get(arm.scheme),
    )


def _speed_ups(arm: Arm, trials: Trials) -> list[float]:
    """How many times faster than serial, seed by seed."""
    serial = trials.get(Arm(arm.data, SERIAL, 1), [])
    return [one.seconds / other.seconds for one, other in zip(serial, trials[arm], strict=False)]


def _series(trials: Trials, threads: Sequence[int]) -> list[Series]:
    """One panel for each data set, one curve for each scheme."""
    curves: dict[tuple[str, str], dict[int, float]] = {}
    for arm in trials:
        speed_ups = _speed_ups(arm, trials)
        if arm.scheme != SERIAL and speed_ups:
            curves.setdefault((arm.data, arm.scheme), {})[arm.threads] = statistics.fmean(speed_ups)
    return [
        Series(label=scheme, panel=data, x=tuple(sorted(points)), y=tuple(points[count] for count in sorted(points)))
        for (data, scheme), points in curves.items()
    ]


def _verdicts(data: str, trials: Trials) -> list[str]:
    """What the paper claims, on the most threads that were tried."""
    arms = [arm for arm in trials if arm.data == data and arm.scheme != SERIAL]
    most = max((arm.threads for arm in arms), default=1)
    serial = trials.get(Arm(data, SERIAL, 1), [])
    notes = []
    for scheme, claim, sign in (("hogwild", "faster", 1), ("round-robin", "slower", -1)):
        speed_ups = _speed_ups(arm, trials) if (arm := Arm(data, scheme, most)) in trials else []
        if speed_ups and most > 1:
            advantages = [sign * (speed_up - 1) for speed_up in speed_ups]
            speed_up = sum(speed_ups) / len(speed_ups)
            said = f"{data}, {scheme} on {most} threads is {claim} than serial (speed-up {speed_up:.2f})"
            notes.append(verdict(said, advantages, "of serial's speed"))
    if (arm := Arm(data, "hogwild", most)) in trials and serial:
        pairs = zip(trials[arm], serial, strict=False)
        differences = [100 * _relative(mine.objective, theirs.objective) for mine, theirs in pairs]
        notes.append(agreement(f"{data}, hogwild's objective is as serial's", differences, "%", within=1))
    return notes


def _relative(value: float, reference: float) -> float:
    return (value - reference) / reference if reference else 0.0
