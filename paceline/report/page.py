"""Writes the report of runs as one HTML file, which needs no network: style, scripts and data are inside it."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.report.material import Material, Source, as_sources, gather
from paceline.report.runs import RunData
from paceline.report.spans import MOST_SPANS
from paceline.report.view import view_of

REPORT = "report.html"


def write_report(source: Source | Sequence[Source], out: Path | None = None) -> Path:
    """Write the report of a run, of several, or of a comparison, and return its path.

    Without ``out`` it is ``report.html`` in the directory of the one run or comparison, else in this directory.
    """
    sources = as_sources(source)
    return write_page(gather(sources), out or default_file(sources))


def default_file(sources: Sequence[Source]) -> Path:
    """Where the report of these goes if nobody says."""
    if len(sources) != 1:
        return Path(REPORT)
    (only,) = sources
    return (only.path if isinstance(only, RunData) else Path(only)) / REPORT


def write_page(material: Material, out: Path, *, most_spans: int = MOST_SPANS) -> Path:
    """Write the page aside and rename it, so that who looks at it never sees a half."""
    text = make_page(
        "report.html", view_of(material, most_spans=most_spans), ("figures.js", "timeline.js", "report.js")
    )
    aside = out.with_name(f".{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(text, encoding="utf-8")
        aside.replace(out)
    except OSError as error:
        raise PacelineError(f"the report could not be written to {out}: {error.strerror}") from error
    return out


def make_page(template: str, data: Mapping[str, Any], scripts: Sequence[str], *, connect: str = "'none'") -> str:
    """Put style, scripts and data into a template of this package.

    No text of a run becomes markup: data are JSON without ``<``, which scripts put into text nodes. The page's policy
    runs no other script than these and loads nothing; ``connect`` is where it may ask for data.
    """
    style = _asset("look.css")
    script = "\n".join(_asset(name) for name in scripts)
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "POLICY": policy,
        "TITLE": html.escape(str(data.get("title", "Paceline"))).encode(errors="replace").decode(),
        "STYLE": style,
        "DATA": as_embedded_json(data),
        "SCRIPT": script,
    }
    pieces = _asset(template).split("@@")  # text, name, text, name, ..., text
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def as_embedded_json(data: Mapping[str, Any]) -> str:
    """JSON that may stand in a ``script`` element: nothing in it can end that element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _asset(name: str) -> str:
    return files("paceline.report").joinpath("page", name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"
