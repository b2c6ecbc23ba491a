"""The live view of a run in a terminal, for those without a browser; 80 columns are enough."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paceline.report.live.watched import Watched

_BARS = "▁▂▃▄▅▆▇█"
_FEW = 12  # workers that have a row each; of more, the slowest ones
_SLOWEST = 8
_LAST_CHANGES = 5
_COLOURS = {"computing": "blue", "waiting": "yellow", "exchanging": "green", "dead": "bold red", "left": "dim"}


def watch_in_terminal(watched: Watched, console: Console, looks: Iterable[object]) -> None:
    """Show the run after each of ``looks``, until they end; the last view stays."""
    with Live(console=console, auto_refresh=False, transient=False, vertical_overflow="crop") as live:
        for _ in looks:
            live.update(render(watched.view(first=0), console.width), refresh=True)


def render(view: dict[str, Any], width: int) -> RenderableType:
    """The view as text of this width."""
    run = view["run"]
    parts: list[RenderableType] = [_head(view)]
    if view["message"]:
        parts.append(Text(view["message"], style="yellow"))
    if view["comparison"] is not None:
        parts.append(_comparison(view["comparison"]))
    if run["history"]["began"] is not None:
        parts += [_figures(run), _curves(run, width)]
    if run["states"]:
        parts += [_counts(run), _workers(run)]
    if run["changes"]:
        parts.append(_changes(run))
    return Group(*parts)


def _head(view: dict[str, Any]) -> Text:
    said = {"waiting": "waiting for it to begin", "running": "going on", "ended": "ended"}[view["stage"]]
    about = [str(each) for each in (view["run"]["config"]["problem"], view["run"]["config"]["policy"]) if each]
    name = Path(view["name"]).name
    return Text.assemble((name, "bold"), f" · {' · '.join([said, *about])}", overflow="ellipsis", no_wrap=True)


def _comparison(comparison: dict[str, Any]) -> Text:
    runs = comparison["runs"]
    now = [f"{run['policy']}, seed {run['seed']}" for run in runs if run["status"] == "running"]
    failed = sum(run["status"] == "failed" for run in runs)
    text = f"run {comparison['done'] + len(now)} of {len(runs)}" + (f": {now[0]}" if now else "")
    return Text(text + (f"; {failed} failed" if failed else ""))


def _figures(run: dict[str, Any]) -> Text:
    progress, figures = run["progress"], run["figures"]
    parts = [f"update {progress['step']:,}"]
    if progress["epochs"]:
        parts.append(f"epoch {min(progress['epoch'] + 1, progress['epochs'])} of {progress['epochs']}")
    if progress["share"] is not None:
        parts.append(f"{progress['share']:.0%} done")
    parts.append(f"{duration(progress['seconds'])}")
    if progress["seconds_left"] is not None:
        parts.append(f"about {duration(progress['seconds_left'])} left")
    if run["evaluations"]:
        named = {name: value for name, value in run["evaluations"][-1].items() if name not in ("time", "step")}
        parts += [f"{name.replace('_', ' ')} {value:.4g}" for name, value in list(named.items())[-1:]]
    if figures["bytes"]:
        parts.append(f"{quantity(figures['bytes'])}B sent")
    return Text(" · ".join(parts))


def _curves(run: dict[str, Any], width: int) -> Table:
    """A line for each: the name, the value now, and its course over the run."""
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column()
    spans, figures = run["history"]["spans"], run["figures"]
    rows = [("loss", figures["loss"], 1), ("examples/s", figures["examples_per_second"], 2)]
    if figures["staleness"] is not None:
        rows.append(("staleness", figures["staleness"], 3))
    for name, now, column in rows:
        course = [span[column] for span in spans if span[column] is not None]
        table.add_row(name, "-" if now is None else quantity(now), sparkline(course, max(10, width - 24)))
    return table


def _counts(run: dict[str, Any]) -> Text:
    text = Text(f"{len(run['states'])} workers: ")
    there = [(state, count) for state, count in run["counts"].items() if count]
    for place, (state, count) in enumerate(there):
        text.append(", " if place else "")
        text.append(f"{count} {state}", style=_COLOURS.get(state, ""))
    return text


def _workers(run: dict[str, Any]) -> Table:
    """A row for each worker, or for the slowest of many."""
    rows: Sequence[dict[str, Any]] = run["workers"]
    title = None
    if len(run["states"]) > _FEW:
        rows, title = run["slowest"][:_SLOWEST], "the slowest of them"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1), show_edge=False, header_style="dim")
    table.add_column("worker", justify="right")
    table.add_column("state")
    for name in ("life", "step", "ms a step", "waiting"):
        table.add_column(name, justify="right")
    table.add_column("")
    for row in rows:
        pace, share = row["seconds_per_step"], row["waiting"]
        table.add_row(
            str(row["rank"]),
            Text(row["state"], style=_COLOURS.get(row["state"], "")),
            str(row["incarnation"] + 1),
            f"{row['step']:,}",
            "-" if pace is None else f"{1000 * pace:,.1f}",
            "-" if share is None else f"{share:.0%}",
            "" if share is None else Text("█" * round(12 * share) + "·" * (12 - round(12 * share)), style="yellow"),
        )
    return table


def _changes(run: dict[str, Any]) -> Text:
    counts, began = run["changed"], run["progress"]["began"]
    lines = [f"{counts.get('joined', 0)} joined, {counts.get('left', 0)} left, {counts.get('died', 0)} died"]
    for at, worker, happening, incarnation in run["changes"][-_LAST_CHANGES:]:
        life = f" (life {incarnation + 1})" if incarnation else ""
        lines.append(f"  {duration(max(0.0, at - began)):>8}  worker {worker} {happening}{life}")
    return Text("\n".join(lines))


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of the values in so many characters; each is the mean of its share of them."""
    if not values:
        return ""
    each = max(1.0, len(values) / width)
    means = []
    for place in range(min(width, len(values))):
        part = values[int(place * each) : max(int(place * each) + 1, int((place + 1) * each))]
        means.append(sum(part) / len(part))
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def quantity(value: float) -> str:
    """A number in about four letters: 0.0123, 12.3, 1.2 k, 34 M."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.3g} {letter}"
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    """A time as 12 s, 3:05 min or 2:03 h."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d} min"
    return f"{minutes // 60}:{minutes % 60:02d} h"
