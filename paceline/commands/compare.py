"""The command ``compare``: the same problem under several policies, one after the other."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.commands.options import PathType, check_problem_name, codec_option, free_directory
from paceline.commands.sparse import NAMES
from paceline.errors import UsageError
from paceline.interrupts import INTERRUPTED

if TYPE_CHECKING:
    from paceline.comparing.comparison import Comparison
    from paceline.problems import Problem

_DEFAULT = ("all-reduce", "k-sync(k=3)", "async", "local-sgd(every=8)")


class _SeveralPolicies(click.Command):
    """A command whose ``--policies`` takes all values up to the next option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread(args, "--policies"))


def spread(arguments: Sequence[str], option: str) -> list[str]:
    """Repeat an option in front of each of its values.

    >>> spread(["digits", "--policies", "sync", "async", "--json"], "--policies")
    ['digits', '--policies', 'sync', '--policies', 'async', '--json']
    """
    spreaded: list[str] = []
    inside = False
    for place, argument in enumerate(arguments):
        if argument.startswith("-"):
            inside = argument == option
            if inside and place + 1 < len(arguments) and not arguments[place + 1].startswith("-"):
                continue  # its values follow
        elif inside:
            spreaded.append(option)
        spreaded.append(argument)
    return spreaded


@click.command(cls=_SeveralPolicies)
@click.argument("problem", default="digits")
@click.option(
    "--policies",
    multiple=True,
    help=f"Such as all-reduce 'k-sync(k=3)' async, or with commas between.  [default: {' '.join(_DEFAULT)}]",
)
@click.option("--workers", type=int, default=4, show_default=True, help="Of each policy.")
@click.option("--delay", metavar="DELAY", help='Time to add to each step, such as "1+exp(0.5) slow(3, 5)".')
@click.option("--delay-unit", metavar="TIME", help="What 1 means in --delay, such as 40ms.  [default: 1s]")
@click.option("--seeds", type=int, default=1, show_default=True, help="How many trainings of each, with other seeds.")
@click.option("--target", type=float, help="Value of the metric to reach.  [default: the problem's own]")
@click.option("--epochs", type=int)
@click.option("--optimizer", help='Such as "sgd(lr=0.1, momentum=0.9)"; the same for all.')
@click.option("--batch-size", type=int, help="Examples in a step of one worker.")
@codec_option
@click.option("--model", help="Another model than the problem's own.")
@click.option("--data", type=PathType(), envvar="PACELINE_DATA", help="Where the data lies.  [PACELINE_DATA]")
@click.option("--virtual", is_flag=True, help="On the virtual cluster, where --delay is the time of a step.")
@click.option("--out", type=PathType(path_type=Path), help="Directory.  [default: runs/compare-PROBLEM-N]")
@click.option("--resume", type=PathType(path_type=Path), help="Go on with the comparison in this directory.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
@click.pass_context
def compare(context: click.Context, /, out: Path | None, resume: Path | None, as_json: bool, **options: Any) -> int:
    """Train PROBLEM under several policies, each on the same data and initial parameters, and alone as the baseline.

    \b
      paceline compare --policies all-reduce "k-sync(k=3)" async --delay "1+exp(0.5)" --delay-unit 20ms
      paceline compare charlm --policies "all-reduce,local-sgd(every=8)" --workers 2 --seeds 3
      paceline compare --virtual --workers 64 --policies sync "k-sync(k=60)" async
    """
    if resume is not None:
        comparison, problem = _resumed(context, resume)
    else:
        comparison, problem = _begun(out, options)
    from paceline.comparing import compare as comparing
    from paceline.report.page import write_report
    from paceline.report.terminal import progress_bar

    interrupted = False
    with progress_bar() as tell:
        try:
            comparing.compare(comparison, problem, tell, write_report)
        except KeyboardInterrupt:
            interrupted = True
    _show(comparison, as_json)
    if interrupted:
        message = f"interrupted; go on with: paceline compare --resume {comparison.path}"
    elif failed := [entry for entry in comparison.entries if entry.status == "failed"]:
        message = f"{len(failed)} of {len(comparison.entries)} trainings failed; {failed[0].policy}: {failed[0].error}"
    else:
        return 0
    print(f"paceline: {message}", file=sys.stderr)
    return INTERRUPTED if interrupted else 1


def _begun(out: Path | None, options: dict[str, Any]) -> tuple[Comparison, Problem]:
    from paceline.comparing.comparison import FILE, Comparison
    from paceline.comparing.options import CompareOptions
    from paceline.studies.options import split_outside_brackets

    name = options["problem"]
    if name in NAMES:
        raise UsageError(
            f"problem {name} is sparse: threads of one process train it, and compare is for problems with a model; "
            "compare its policies with paceline train, or with paceline study hogwild"
        )
    check_problem_name(name)
    if out is not None and (out / FILE).exists():
        raise UsageError(f"{out} already holds a comparison; go on with it (--resume {out}), or choose another --out")
    policies = [piece.strip() for text in options.pop("policies") for piece in split_outside_brackets(text)]
    checked = CompareOptions(policies=tuple(filter(None, policies)) or _DEFAULT, **options)
    problem = checked.check()
    path = out or free_directory("out", lambda number: f"runs/compare-{problem.name}-{number}")
    return Comparison.begin(path, checked, problem, ["paceline", *_without_out(sys.argv[1:])]), problem


def _without_out(arguments: Sequence[str]) -> list[str]:
    """The arguments for another directory: this one will hold a comparison.

    >>> _without_out(["compare", "--out", "runs/a", "--seeds", "2", "--out=runs/b"])
    ['compare', '--seeds', '2']
    """
    before = ["", *arguments]
    pairs = zip(before, arguments, strict=False)
    return [each for last, each in pairs if "--out" not in (last, each) and not each.startswith("--out=")]


def _resumed(context: click.Context, path: Path) -> tuple[Comparison, Problem]:
    from paceline.comparing.comparison import Comparison

    given = [
        f"--{name.replace('_', '-')}"
        for name in context.params
        if name not in ("resume", "as_json", "data")
        and context.get_parameter_source(name) != click.core.ParameterSource.DEFAULT
    ]
    if given:
        raise UsageError(f"--resume goes on with the options of the comparison in {path}; leave out {given[0]}")
    comparison = Comparison.load(path)
    return comparison, comparison.options.check()


def _show(comparison: Comparison, as_json: bool) -> None:
    from paceline.report.groups import summarise
    from paceline.report.material import gather
    from paceline.report.page import REPORT
    from paceline.report.table import print_summary
    from paceline.report.view import finite

    material, report = gather(comparison.path), comparison.path / REPORT
    rows = summarise(material.groups)
    if as_json:
        told = {"problem": comparison.problem, "metric": comparison.metric, "target": comparison.target}
        where = {"comparison": str(comparison.path), "report": str(report)}
        summary = finite([dataclasses.asdict(row) for row in rows])
        failures = list(material.failures)
        print(
            json.dumps({**told, "virtual": comparison.options.virtual, "rows": summary, "failures": failures, **where})
        )
        return
    print(material.sentence)
    print_summary(rows)
    print(f"report: {report}")
