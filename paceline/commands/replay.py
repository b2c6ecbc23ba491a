"""The command ``replay``: replay a recorded run and compare it with the trace."""

from __future__ import annotations

import code
import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.commands.options import PathType
from paceline.errors import PacelineError, UsageError

if TYPE_CHECKING:
    from paceline.record.trace import Trace
    from paceline.replay.outcome import Replayed
    from paceline.training.replay_problem import ProblemReplay


@click.command()
@click.argument("run", type=PathType(path_type=Path))
@click.option("--until", type=int, metavar="STEP", help="Stop after the commit that makes this version.")
@click.option("--shell", is_flag=True, help="Open a Python shell there, with the model, optimizer and pushes.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def replay(run: Path, until: int | None, shell: bool, as_json: bool) -> int:
    """Replay a recorded RUN and compare it with its trace; the exit code is 1 if any bit differs."""
    from paceline.training.replay_environment import doubts, open_trace

    if shell and as_json:
        raise UsageError("--shell is for people and --json for machines; give one of them")
    trace, config = open_trace(run)
    warnings = doubts(trace.about, config)
    for warning in () if as_json else warnings:
        print(f"paceline: warning: {warning}; bits may differ", file=sys.stderr)
    replaying: ProblemReplay | None = None
    if "blocks" in trace.about:  # the policy has no server
        if shell or until is not None:
            raise UsageError(
                f"a run under {trace.about['policy']} is replayed as a whole; leave out --until and --shell"
            )
        replayed = _replay_without_server(run, trace, quiet=as_json)
    elif "train" in config:
        replaying, replayed = _replay_problem(run, trace, config, until)
    else:
        replayed = _replay_script(run, trace, until, shell=shell, quiet=as_json)
    if as_json:
        equal = replayed.difference is None
        print(json.dumps({"run": str(run), "equal": equal, **asdict(replayed), "warnings": warnings}))
        return 0 if equal else 1
    if replayed.difference is not None:
        raise PacelineError(_differing(replayed, warnings))
    print(_equal(replayed, stopped=until is not None))
    if shell and replaying is not None:  # a script's shell was open in its server's process
        _open_shell(replaying)
    return 0


def _replay_problem(
    run: Path, trace: Trace, config: dict[str, Any], until: int | None
) -> tuple[ProblemReplay, Replayed]:
    """Replay a run of ``paceline train`` in this process."""
    from paceline.replay.plan import read_plan
    from paceline.report.terminal import progress_bar
    from paceline.training.replay_environment import as_recorded, train_config
    from paceline.training.replay_problem import ProblemReplay
    from paceline.training.train import load_config_problem

    options, about, plan = train_config(run, config), trace.about, read_plan(trace)
    with as_recorded(about):
        problem = load_config_problem(options)
        replaying = ProblemReplay(
            options, problem, plan, seed=about["seed"], workers=about["world_size"], servers=about.get("servers", 1)
        )
        with progress_bar() as tell:
            return replaying, replaying.run(until, lambda done, total: tell(f"replaying {run}", done, total))


def _replay_script(run: Path, trace: Trace, until: int | None, *, shell: bool, quiet: bool) -> Replayed:
    """Replay the run of a user's script; with ``quiet`` its output goes to stderr."""
    from paceline.replay.script import replay_script
    from paceline.report.terminal import progress_bar

    if shell:
        return replay_script(run, trace, until=until, shell=True)
    with contextlib.redirect_stdout(sys.stderr) if quiet else contextlib.nullcontext(), progress_bar() as tell:
        text = f"replaying {run}"
        return replay_script(run, trace, until=until, shell=False, tell=lambda done, total: tell(text, done, total))


def _replay_without_server(run: Path, trace: Trace, *, quiet: bool) -> Replayed:
    from paceline.replay.script import replay_without_server

    with contextlib.redirect_stdout(sys.stderr) if quiet else contextlib.nullcontext():
        return replay_without_server(run, trace)


def _equal(replayed: Replayed, *, stopped: bool) -> str:
    parts = [f"{_compared(replayed)}: equal to the last bit"]
    if stopped:
        parts.append(f"version {replayed.version} has the hash {replayed.digest}")
    elif not replayed.whole:
        parts.append("the trace ends there, before the end of the run")
    return "; ".join(parts)


def _differing(replayed: Replayed, warnings: Sequence[str]) -> str:
    parts = [f"{_compared(replayed)} are equal, then bits differ: {replayed.difference}"]
    return "; ".join([*parts, *(f"note that {warning}" for warning in warnings)])


def _compared(replayed: Replayed) -> str:
    return f"{replayed.commits} commits, {replayed.pushes} pushes and {replayed.hashes} hashes"


def _open_shell(replaying: ProblemReplay) -> None:
    from paceline.replay.outcome import ReplayedPush

    names = {
        "model": replaying.train_state.model,
        "optimizer": replaying.train_state.optimizers[0],
        "problem": replaying.problem,
        "version": replaying.version,
        "pushes": replaying.last_pushes(),
    }
    banner = f"version {replaying.version}: {', '.join(names)}; a push has {', '.join(ReplayedPush._fields)}"
    code.interact(banner, local=names, exitmsg="")
