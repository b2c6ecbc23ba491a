"""``paceline train`` of sparse problems: which options go with them, and their result."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from paceline.commands.options import PathType
from paceline.errors import UsageError
from paceline.interrupts import StopRequest

NAMES = ("svm", "matrix-completion", "graph-cut")
OWN = frozenset({"test", "cache", "loss", "rank", "regulariser", "intercept", "rate"})  # not of neural problems
_SHARED = frozenset({"problem", "data", "policy", "epochs", "decay", "seed", "run", "resume", "save_every", "as_json"})
_WITH_ALL = frozenset({"rate"})


def sparse_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of sparse problems to ``paceline train``."""
    for option in (
        click.option("--rate", type=float, help="Sparse problems: the step size, which --decay multiplies each epoch."),
        click.option("--intercept", is_flag=True, help="svm: learn an intercept, which all updates share."),
        click.option("--regulariser", type=float, help="svm, matrix-completion: the weight of the penalty."),
        click.option("--rank", type=int, help="matrix-completion: columns of the factors.  [default: 10]"),
        click.option("--loss", help="svm: hinge, logistic (log_loss) or squared (squared_error).  [default: hinge]"),
        click.option("--cache", type=PathType(), help="Sparse problems: where mapped copies of the data go."),
        click.option("--test", type=PathType(), help="svm, matrix-completion: a file of test data."),
    ):
        command = option(command)
    return command


def refuse_sparse_options(given: Mapping[str, Any], problem: str) -> None:
    """Raise if an option of sparse problems was given for another problem."""
    for name in sorted(OWN & given.keys()):
        raise UsageError(f"{_flag(name)} goes with the problems {', '.join(NAMES)}, not with {problem}")


def saved_sparse(run: str) -> dict[str, Any] | None:
    """The configuration of a run of a sparse problem; None if the directory holds no such run."""
    from paceline.training.sparse import SparseConfig

    file = Path(run) / "config.json"
    try:
        saved = dict(json.loads(file.read_text())["sparse"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    try:
        problem = SparseConfig.from_dict(saved).options.problem
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from error
    if problem not in NAMES:
        raise UsageError(f"{file}: wanted one of the problems {', '.join(NAMES)}, found {problem!r}")
    return saved


def check_resumed_problem(run: str, problem: str | None) -> None:
    """Raise if the directory holds no run, or one of another problem than the user named."""
    file = Path(run) / "config.json"
    try:
        config = json.loads(file.read_text())
        own = str(config["sparse"]["options"]["problem"] if "sparse" in config else config["train"]["problem"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise not_a_run(file) from error
    moved = own.endswith(".py") and str(problem).endswith(".py")  # a file may lie elsewhere by now
    if problem not in (None, own) and not moved:
        raise UsageError(f"{run} is a run of {own!r}, not of {problem!r}; leave the problem out to resume it")


def not_a_run(file: Path) -> UsageError:
    """The error about a directory to resume that holds no run."""
    return UsageError(
        f"--resume wants the directory of a run of 'paceline train'; {file} is missing or is not of such a run"
    )


def train_sparse_problem(
    given: dict[str, Any], saved: Mapping[str, Any] | None, free_run: Callable[[str], str]
) -> None:
    """Train with the options that the user gave, over those of a run that is resumed."""
    from paceline.hogwild.tasks import load_task
    from paceline.training.sparse import SparseConfig, SparseResult, train_sparse

    as_json, resume = given.pop("as_json", False), given.pop("resume", None)
    config = SparseConfig.from_dict(_values(given, saved))
    task = load_task(config.options)
    run = resume or config.run or free_run(task.name)
    config = SparseConfig.from_dict({**asdict(config), "run": str(run), "resume": resume is not None})
    if not as_json:
        for note in task.notes:
            click.echo(f"paceline: {note}", err=True)
    try:
        with StopRequest().heard() as request, contextlib.ExitStack() as stack:
            watch = None if as_json else stack.enter_context(_progress_line(task.name))
            result: SparseResult = train_sparse(config, task, watch, lambda: request.asked)
    except KeyboardInterrupt:
        begun = (Path(str(run)) / "config.json").exists()
        raise KeyboardInterrupt(f"interrupted; go on with: paceline train --resume {run}" if begun else "") from None
    if as_json:
        print(json.dumps(result.as_dict()))
    else:
        _show(result)
        if result.measured["objective"] > result.first_objective:
            rate = config.rate or task.rate
            text = (
                f"the objective ended above that of the start, {result.first_objective:.6g}; lower the rate, {rate:g}"
            )
            click.echo(f"paceline: warning: {text} (--rate)", err=True)


def _values(given: dict[str, Any], saved: Mapping[str, Any] | None) -> dict[str, Any]:
    """The fields of the configuration, those of the problem apart."""
    from paceline.hogwild.tasks import OPTIONS, TaskOptions

    values: dict[str, Any] = dict(saved or {})
    options = dict(values.pop("options", {}))
    problem = options["problem"] if saved is not None else given["problem"]
    fitting = _SHARED | _WITH_ALL | OPTIONS[problem]
    for name in given:
        if name not in fitting:
            flags = ", ".join(_flag(each) for each in sorted(fitting - {"problem"}))
            raise UsageError(f"{_flag(name)} does not go with the problem {problem!r}; its options are {flags}")
    if "decay" in given:
        given["decay"] = _number(given["decay"])
    own = {name for name in given if name in TaskOptions.__dataclass_fields__}
    options |= {name: given[name] for name in own} | {"problem": problem}
    rest = {name: value for name, value in given.items() if name not in own or name == "seed"}
    return {**values, **rest, "options": options}


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise UsageError(
            f"--decay of a sparse problem multiplies the rate after each epoch: wanted a number as 0.9, got {text!r}"
        ) from error


def _flag(name: str) -> str:
    return "--json" if name == "as_json" else f"--{name.replace('_', '-')}"


def _progress_line(title: str) -> Any:
    from paceline.report.terminal import ProgressLine

    return ProgressLine(title, unit="updates")


def _show(result: Any) -> None:
    found = result.sparsity
    finished = result.resumed_at == result.updates
    spent = "; the run was finished already" if finished else f" in {result.seconds:.1f} s"
    searched = "" if found["exact"] else " at least"
    print(
        f"{result.problem}: {result.metric.replace('_', ' ')} {result.value:.6g}, objective "
        f"{result.measured['objective']:.6g}, after {_count(result.epochs, 'epoch')}{spent}"
    )
    lost = "" if result.lost_update_rate is None else f", {result.lost_update_rate:.2g} of the watched updates lost"
    if not finished:
        speed = f"{result.updates_per_second:,.0f} updates a second"
        print(f"{result.policy} on {_count(result.threads, 'thread')}: {speed}{lost}")
    bound = found["predicted_slowdown"]
    races = "" if bound is None else f"; races cost at most {bound:.3g} times the updates of one thread (a bound)"
    print(f"Omega {found['omega']}, Delta {found['delta']:.2g}, rho{searched} {found['rho']:.2g}{races}")
    print(f"run: {result.run}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
