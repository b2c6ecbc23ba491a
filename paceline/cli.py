"""The command ``paceline``: it parses, calls the library, and prints for people or (``--json``) for machines."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from paceline.errors import PacelineError, UsageError, unknown_name
from paceline.version import __version__

# torch takes seconds to import; what needs it is imported inside the commands, so that --help is instant.


class _Command(click.Group):
    """A group whose unknown subcommands are answered with the nearest known one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise click.UsageError(str(unknown_name("command", args[0], self.commands)))
        return super().resolve_command(ctx, args)


@click.group(cls=_Command, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="paceline")
def cli() -> None:
    """Train one PyTorch model on many workers; how they keep pace is a value you pass in."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command; a user's mistake is one line on stderr and exit code 2, a failed run exit code 1."""
    try:
        code = cli.main(args=arguments, standalone_mode=False)
    except click.ClickException as error:
        _fail(error.format_message(), 2)
    except UsageError as error:
        _fail(str(error), 2)
    except PacelineError as error:
        _fail(str(error), 1)
    except (KeyboardInterrupt, click.Abort):
        _fail("interrupted", 130)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> NoReturn:
    print(f"paceline: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


@cli.command()
@click.argument("problem", default="digits")
@click.option("--model", help="Another model than the problem's own.")
@click.option("--data", type=click.Path(), envvar="PACELINE_DATA", help="Where the data lies.  [PACELINE_DATA]")
@click.option("--policy", default="all-reduce", show_default=True, help="How the workers keep pace.")
@click.option("--optimizer", help='Such as "sgd(lr=0.1, momentum=0.9)".')
@click.option("--batch-size", type=int, help="Examples in a step of one worker.")
@click.option("--epochs", type=int)
@click.option("--max-steps", type=int, help="Stop after this many updates.")
@click.option("--base-batch", type=int, help="Batch the rate was tuned for: scales it linearly to this run's.")
@click.option("--warmup", default="none", show_default=True, help="none, constant or gradual.")
@click.option("--warmup-epochs", type=float, default=5.0, show_default=True)
@click.option("--warmup-start", type=float, help="Share of the rate to start from.  [default: before scaling]")
@click.option("--decay", default="none", show_default=True, help="none, step or cosine.")
@click.option(
    "--decay-epochs", default="30,60,80", show_default=True, help="Where step decay multiplies the rate."
)
@click.option("--decay-factor", type=float, default=0.1, show_default=True)
@click.option("--clip-norm", type=float, help="Clip gradients to this norm.")
@click.option("--precision", default="fp32", show_default=True, help="fp32, or bf16 by autocast.")
@click.option("--device", default="auto", show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--run", type=click.Path(), help="Directory of the run.  [default: runs/PROBLEM-N]")
@click.option("--resume", type=click.Path(), help="Go on with the run in this directory, with its options.")
@click.option("--save-every", type=int, help="Updates between checkpoints.  [default: one epoch]")
@click.option("--log-every", type=int, default=1, show_default=True, help="Updates between lines of metrics.")
@click.option(
    "--on-nan", default="stop", show_default=True, help="stop, skip or ignore a loss that is not finite."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
@click.pass_context
def train(context: click.Context, /, resume: str | None, as_json: bool, **options: Any) -> None:
    """Train a built-in PROBLEM, or the one that a Python file makes (path/to/file.py)."""
    from paceline.report.terminal import ProgressLine
    from paceline.training import TrainConfig, load_config_problem
    from paceline.training import train as train_problem

    if resume is not None:
        options = {**_saved_options(resume), **_typed(context, options), "run": resume, "resume": True}
    schedule = _schedule_config(options)
    config = TrainConfig(schedule=schedule, **options)
    problem = load_config_problem(config)
    config = dataclasses.replace(config, run=config.run or _free_directory(problem.name))
    with _stop_on_sigterm(), contextlib.ExitStack() as stack:
        watch = None if as_json else stack.enter_context(ProgressLine(problem.name))
        try:
            result = train_problem(config, problem, watch)
        except KeyboardInterrupt:
            stack.close()
            _fail(f"interrupted; go on with: paceline train --resume {config.run}", 130)
    if as_json:
        print(json.dumps(result.as_dict()))
        return
    goal = "" if result.target is None else f" (target {result.target:g})"
    spent = f"after {result.steps} steps in {result.seconds:.1f} s"
    print(f"{result.problem}: {result.metric} {result.value:.4f}{goal} {spent}")
    print(f"run: {result.run}")


def _schedule_config(options: dict[str, Any]) -> Any:
    """Take the schedule's options out of ``options``."""
    from paceline.schedules import ScheduleConfig

    taken = {field.name: options.pop(field.name) for field in dataclasses.fields(ScheduleConfig)}
    try:
        epochs = tuple(float(epoch) for epoch in str(taken["decay_epochs"]).split(",") if epoch.strip())
    except ValueError as error:
        raise UsageError(
            f"--decay-epochs wants numbers with commas between, such as 30,60,80, got {taken['decay_epochs']!r}"
        ) from error
    return ScheduleConfig(**{**taken, "decay_epochs": epochs})


def _typed(context: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """The options that the user gave, as opposed to defaults."""
    default = click.core.ParameterSource.DEFAULT
    return {name: value for name, value in options.items() if context.get_parameter_source(name) != default}


def _saved_options(run: str) -> dict[str, Any]:
    """Read back the options of a run that ``paceline train`` made."""
    file = Path(run) / "config.json"
    try:
        saved: dict[str, Any] = json.loads(file.read_text())["train"]
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"--resume wants the directory of a run of 'paceline train'; no such {file}") from error
    schedule = saved.pop("schedule")
    schedule["decay_epochs"] = ",".join(str(epoch) for epoch in schedule["decay_epochs"])
    return {**saved, **schedule}


def _free_directory(problem: str) -> str:
    """Name the first directory ``runs/PROBLEM-N`` that is not there yet, and make it ours."""
    number = 1
    while True:
        path = Path("runs") / f"{problem}-{number}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return str(path)


@contextlib.contextmanager
def _stop_on_sigterm() -> Iterator[None]:
    """Let SIGTERM (a scheduler's or a user's kill) end a run as Ctrl-C does: saved and resumable."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
