"""The command ``report``: the HTML report of runs or of a comparison, and its figures and numbers as files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from paceline.commands.options import PathType

_PATH = PathType(path_type=Path)


@click.command()
@click.argument("runs", nargs=-1, required=True, type=_PATH, metavar="RUN...")
@click.option("--out", type=_PATH, metavar="FILE", help="The page.  [default: report.html in RUN; here, if several]")
@click.option("--figures", type=_PATH, metavar="DIR", help="Also write the figures there, as PNG and SVG.")
@click.option("--csv", type=_PATH, metavar="DIR", help="Also write the numbers there, as CSV.")
@click.option(
    "--trace", type=_PATH, metavar="FILE", help="Also write the timelines there, for Perfetto (.json or .gz)."
)
@click.option("--target", type=float, help="Of the metric, for the time to it.  [default: the comparison's]")
@click.option("--tensorboard", type=_PATH, metavar="DIR", help="Also write the runs there, for TensorBoard.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def report(
    runs: tuple[Path, ...],
    out: Path | None,
    figures: Path | None,
    csv: Path | None,
    trace: Path | None,
    target: float | None,
    tensorboard: Path | None,
    as_json: bool,
) -> None:
    """Write the report of one RUN, of several, or of a comparison: one HTML file that needs no network.

    \b
      paceline report runs/digits-1
      paceline report runs/digits-1 runs/digits-2 --out both.html --figures figures --csv numbers
    """
    from paceline.report.groups import summarise
    from paceline.report.material import gather
    from paceline.report.page import default_file, write_page
    from paceline.report.table import print_summary
    from paceline.report.view import finite

    material = gather(runs, target=target)
    if tensorboard is not None:
        from paceline.report.tensorboard import export_runs

        export_runs(runs, tensorboard)
    files = [write_page(material, out or default_file(runs))]
    if figures is not None:
        from paceline.report.figures import write_figures

        files += write_figures(material, figures)
    if csv is not None or trace is not None:
        from paceline.report.export import write_csv, write_trace

        files += write_csv(material, csv) if csv is not None else []
        files += [write_trace(material, trace)] if trace is not None else []
    rows = summarise(material.groups)
    if as_json:
        summary = finite([dataclasses.asdict(row) for row in rows])
        told = {"report": str(files[0]), "files": list(map(str, files)), "summary": summary}
        print(json.dumps({**told, "failures": list(material.failures)}))
        return
    for failure in material.failures:
        click.echo(f"paceline: warning: {failure}", err=True)
    print_summary(rows)
    written = {"figures": figures, "numbers": csv, "trace": trace, "tensorboard": tensorboard, "report": files[0]}
    for name, path in written.items():
        if path is not None:
            print(f"{name}: {path}")
