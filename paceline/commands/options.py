"""Options that several commands share, and the functions that read them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from paceline.errors import UsageError, unknown_name


class PathType(click.Path):
    """A path; a value that begins with ``-`` is refused, since it is an option after a forgotten path."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if str(value).startswith("-"):
            self.fail(f"wanted a path, found {str(value)!r}; if that is its name, write ./{value}", param, ctx)
        return super().convert(value, param, ctx)


def delay_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of ``run`` and ``train`` for slow and killed workers."""
    for option in (
        click.option("--delay-unit", metavar="TIME", help="What 1 means in --delay, such as 40ms.  [default: 1s]"),
        click.option("--delay", metavar="DELAY", help='Time to add to each step, such as "1+exp(0.5) slow(3, 5)".'),
        click.option("--respawn", is_flag=True, help="Replace workers that are killed."),
    ):
        command = option(command)
    return command


def servers_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option for the number of servers."""
    text = "Under a server policy: processes that share the parameters."
    return click.option("--servers", type=int, default=1, show_default=True, help=text)(command)


def codec_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option for the codec."""
    text = 'Make what is exchanged fewer bytes, such as "top-k(density=0.001)"; "none" for none.'
    return click.option("--codec", help=text)(command)


def check_codec(codec: str | None, policy: str | None) -> None:
    """Raise if there is no such codec, or the policy, where the command names one, cannot have it."""
    if codec is not None:  # else torch need not be imported
        from paceline.codecs import read_codec
        from paceline.peers import connect
        from paceline.policies import parse_policy

        chosen = read_codec(codec)
        if policy is not None:
            connect.check_codec(parse_policy(policy), chosen)


def needs_server(policy: str | None, asked_by: str | None, workers: int | None) -> bool:
    """Whether a policy has a parameter server; raise if it has none and ``asked_by`` needs one.

    Also raise if the policy cannot run with this number of workers, if that is known.
    """
    if policy is None:
        return False
    from paceline.policies import POLICIES, ServerPolicy, parse_policy
    from paceline.policies.sparse import check_for_module

    parsed = parse_policy(policy)
    check_for_module(parsed)
    if isinstance(parsed, ServerPolicy):
        if workers is not None:
            parsed.begin(workers)
        if parsed.combined_by != "mean":  # else torch need not be imported
            from paceline.aggregators import aggregator_of

            aggregator_of(parsed, workers)
        return True
    if asked_by is not None:
        known = ", ".join(name for name, kind in POLICIES.items() if issubclass(kind, ServerPolicy))
        raise UsageError(f"{asked_by} wants a policy with a parameter server, found {policy}; choose one of {known}")
    return False


def processes_per_worker(policy: str | None, workers: int | None = None) -> int:
    """How many processes a policy wants in the place of each worker; raise if it cannot run on so many workers."""
    from paceline.policies import PeersPolicy, parse_policy

    parsed = None if policy is None else parse_policy(policy)
    if not isinstance(parsed, PeersPolicy):
        return 1
    if workers is not None:
        parsed.check_processes(workers * parsed.processes_per_worker)
    return parsed.processes_per_worker


def read_delay(text: str | None, unit: str | None, workers: int | None) -> tuple[str, float] | None:
    """Check a delay and its unit, and the workers that it names if their number is known."""
    if text is None:
        if unit is not None:
            raise UsageError(f'--delay-unit goes with --delay, such as --delay "1+exp(0.5)" --delay-unit {unit}')
        return None
    from paceline.delays.delay import parse_delay
    from paceline.delays.injected import InjectedDelays, parse_unit

    delay = parse_delay(text)
    if workers is not None:
        delay.check_workers(workers)
    seconds = parse_unit(unit or "1s")
    InjectedDelays(text, seconds, seed=0, worker=0)  # refuses delays that only virtual workers can have
    return text, seconds


def free_directory(option: str, name: Callable[[int], str]) -> Path:
    """Make the first directory of ``name(1)``, ``name(2)``, ... that does not exist yet."""
    number = 1
    while True:
        path = Path(name(number))
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
        except OSError as error:
            raise UsageError(
                f"cannot make the directory {path}: {error.strerror}; choose one with --{option}"
            ) from error
        else:
            return path


def check_problem_name(name: str, *more: str) -> None:
    """Raise if no problem of this name is known, nor one of ``more``; a file of the user's may have any name."""
    from paceline.problems.load import PROBLEMS

    if name not in PROBLEMS and ".py" not in name:
        raise unknown_name("problem", name, [*PROBLEMS, *more])
