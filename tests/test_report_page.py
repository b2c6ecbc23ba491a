"""The report's page and files: what is inside them, how large they are, and that no text becomes markup."""

from __future__ import annotations

import base64
import csv
import gzip
import hashlib
import html.parser
import json
import re
import time
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import make_comparison, make_million, make_run

from paceline.record.timeline import RECORD, Kind, Records
from paceline.report.export import write_csv, write_trace
from paceline.report.figures import write_figures
from paceline.report.look import COLOURS
from paceline.report.material import gather
from paceline.report.page import as_embedded_json, write_report
from paceline.report.plots import draw
from paceline.report.runs import read_run
from paceline.report.series import Axis, Series
from paceline.report.spans import MIXTURE, merge, merge_to, pack
from paceline.report.view import view_of

HOSTILE = '</script><img src=x onerror="alert(1)"><!--<script>\'&quot;{{\u2028'


class Tags(html.parser.HTMLParser):
    """The elements of a page, and the contents of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.scripts: list[str] = []
        self.metas: list[dict[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "script":
            self.scripts.append("")
        elif tag == "meta":
            self.metas.append(dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        self.tags.append(f"/{tag}")

    def handle_data(self, data: str) -> None:
        if self.scripts and self.tags[-1] == "script":
            self.scripts[-1] += data


def embedded(file: Path) -> dict[str, Any]:
    """The data of a page."""
    data: dict[str, Any] = json.loads(Tags(file.read_text()).scripts[0])
    return data


# The page ---------------------------------------------------------------------------------------------------------


def test_the_page_needs_nothing_else_and_runs_no_other_script(tmp_path: Path) -> None:
    text = write_report(make_run(tmp_path / "one")).read_text()
    page = Tags(text)
    (policy,) = [meta["content"] for meta in page.metas if meta.get("http-equiv") == "Content-Security-Policy"]
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert policy is not None and f"default-src 'none'; script-src 'sha256-{digest}'" in policy
    assert not re.search(r"(src|href)=[\"']?(https?:|//)|@import|url\((?!#)", text)


@pytest.mark.parametrize("kind", ["run", "runs", "comparison"])
def test_no_text_of_a_run_becomes_markup(kind: str, tmp_path: Path) -> None:
    plain, hostile = tmp_path / "plain", tmp_path / "hostile"
    for folder, text in ((plain, ""), (hostile, HOSTILE)):
        if kind == "comparison":
            make_comparison(folder, seeds=[0], text=text)
        else:
            make_run(folder, text=text)
    beside = [make_run(tmp_path / "beside")] if kind == "runs" else []
    pages = [write_report([folder, *beside], out=folder / "page.html") for folder in (plain, hostile)]
    assert Tags(pages[0].read_text()).tags == Tags(pages[1].read_text()).tags
    assert HOSTILE in json.dumps(embedded(pages[1]), ensure_ascii=False).replace('\\"', '"')


@given(st.dictionaries(st.text(), st.text()))
def test_embedded_json_cannot_end_its_script(data: dict[str, str]) -> None:
    text = as_embedded_json(data)
    assert "<" not in text and json.loads(text) == data


def test_a_broken_run_among_others_is_told_and_the_rest_is_shown(tmp_path: Path, paceline: Any) -> None:
    (tmp_path / "empty").mkdir()
    one, out = make_run(tmp_path / "one"), tmp_path / "page.html"
    ended = paceline("report", str(one), str(tmp_path / "empty"), "--out", str(out), "--json")
    assert ended.code == 0
    told = json.loads(ended.out)
    assert told["report"] == str(out) and len(told["summary"]) == 1 and "is empty" in told["failures"][0]
    assert "is empty" in embedded(out)["failures"][0]


def test_the_sentence_tells_what_was_compared(tmp_path: Path) -> None:
    data = embedded(write_report(make_comparison(tmp_path / "four")))
    assert data["sentence"] == (
        "4 policies and one worker on digits, with 4 workers, slowed by 1+exp(0.5) in units of 20ms, "
        "with the seeds 0 and 1; the target is accuracy 0.9."
    )
    assert data["error"]["target"] == pytest.approx(0.1)
    assert [each["label"] for each in data["curves"]["time"]] == [row["label"] for row in data["summary"]]
    assert all(len(each["x"]) == len(each["low"]) > 5 for each in data["curves"]["bytes"])


def test_the_command_writes_all_files(tmp_path: Path, paceline: Any) -> None:
    path = make_comparison(tmp_path / "four", seeds=[0])
    ended = paceline("report", str(path), "--csv", str(tmp_path / "csv"), "--trace", str(tmp_path / "trace.json"))
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[-1] == f"report: {path / 'report.html'}"
    assert "one worker" in ended.out and (tmp_path / "trace.json").exists() and (tmp_path / "csv" / "time.csv").exists()


def test_a_report_that_cannot_be_written_is_told(tmp_path: Path, paceline: Any) -> None:
    (tmp_path / "file").touch()
    ended = paceline("report", str(make_run(tmp_path / "one")), "--out", str(tmp_path / "file" / "page.html"))
    assert ended.code == 1 and "the report could not be written to" in ended.err


# Spans ------------------------------------------------------------------------------------------------------------


@st.composite
def records(draw: st.DrawFn) -> Records:
    """A worker's records without gaps."""
    listed = draw(st.lists(st.tuples(st.integers(0, 6), st.sampled_from([0.001, 0.01, 0.5, 3.0])), min_size=1))
    made = np.zeros(len(listed), RECORD)
    made["kind"] = [kind for kind, _ in listed]
    made["duration"] = [0.0 if kind in (Kind.BEGAN, Kind.LEFT) else length for kind, length in listed]
    made["start"] = np.cumsum(made["duration"], dtype=np.float64) - made["duration"]
    made["step"] = np.arange(len(listed))
    return made


@given(records(), st.sampled_from([0.0, 0.005, 0.1, 1.0, 100.0]))
def test_merging_keeps_the_seconds_of_every_kind_and_all_that_is_long(made: Records, width: float) -> None:
    spans = merge(made, width)
    mixed = spans.kind == MIXTURE
    for kind in range(4):
        before = made["duration"][made["kind"] == kind].sum(dtype=np.float64)
        after = spans.duration[spans.kind == kind].sum() + (spans.shares[:, kind] * spans.duration[mixed]).sum()
        assert after == pytest.approx(before, abs=1e-4)
    kept = (made["duration"] >= max(width, 1e-9)) | (made["kind"] >= Kind.BEGAN)
    assert set(made["start"][kept]) <= set(spans.start[~mixed])
    assert spans.counts.sum() + (~mixed).sum() == len(made)
    assert (np.diff(spans.start) >= 0).all()


def test_as_many_spans_as_fit_are_kept_apart() -> None:
    made = np.zeros(5000, RECORD)
    made["duration"] = 0.01
    made["start"] = np.arange(5000) * 0.01
    assert sum(map(len, merge_to({0: made, 1: made}, 10_000).values())) == 10_000
    merged = merge_to({0: made, 1: made}, 1000)
    assert 250 <= sum(map(len, merged.values())) <= 1000


def test_packed_times_are_exact_to_the_quantum() -> None:
    made = np.zeros(3, RECORD)
    made["start"], made["duration"], made["step"] = [0.0, 1.5, 90_000.25], [1.5, 2.0, 0.5], [1, 2, 2**32 - 1]
    packed = pack({7: made})
    worker = packed["workers"][0]
    times = {name: np.frombuffer(base64.b64decode(worker[name]), "<u4") for name in ("start", "duration", "step")}
    assert times["start"] * packed["quantum"] == pytest.approx(made["start"], abs=packed["quantum"])
    assert times["duration"] * packed["quantum"] == pytest.approx(made["duration"], abs=2 * packed["quantum"])
    assert times["step"].tolist() == [1, 2, 2**32 - 1] and worker["rank"] == 7


@pytest.mark.soak
def test_a_million_spans_make_a_page_of_a_few_megabytes(tmp_path: Path) -> None:
    path = make_million(tmp_path / "million")
    began = time.perf_counter()
    page = write_report(path)
    print(f"{page.stat().st_size / 1e6:.2f} MB in {time.perf_counter() - began:.1f} s")
    assert page.stat().st_size < 5e6
    assert all(len(each["x"]) <= 500 for series in embedded(page)["curves"].values() for each in series)


def test_many_seeds_share_the_room_for_spans(tmp_path: Path) -> None:
    material = gather(make_comparison(tmp_path / "four"))
    assert len(view_of(material)["timelines"]) == 10
    few = view_of(material, most_spans=500)["timelines"]
    assert [each["seed"] for each in few] == [0] * 5 and all(each["data"]["merged"] for each in few)


# Files ------------------------------------------------------------------------------------------------------------


def read_csv(file: Path) -> list[list[str]]:
    return list(csv.reader(file.read_text().splitlines()))


def test_numbers_as_csv(tmp_path: Path) -> None:
    material = gather(make_comparison(tmp_path / "four", seeds=[0]))
    tables = {file.stem: read_csv(file) for file in write_csv(material, tmp_path / "csv")}
    assert [row[0] for row in tables["summary"]] == ["policy", *(each.label for each in material.groups)]
    assert tables["evaluations"][0][:5] == ["run", "policy", "seed", "seconds", "steps"]
    assert len(tables["evaluations"]) == 1 + 5 * 10 and len(tables["progress"]) == 1 + 5 * 60
    assert sum(float(row[5]) for row in tables["time"][1:]) > 0
    assert any(row[5] == "died" for row in tables["changes"])


def test_a_text_that_a_spreadsheet_would_run_is_quoted(tmp_path: Path) -> None:
    path = make_run(tmp_path / "one", policy="=1+1")
    assert read_csv(write_csv(gather(path), tmp_path / "csv")[0])[1][0] == "'=1+1"


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_has_a_process_for_each_run_and_a_thread_for_each_worker(name: str, tmp_path: Path) -> None:
    material = gather(make_comparison(tmp_path / "four", seeds=[0]))
    data = write_trace(material, tmp_path / name).read_bytes()
    events = json.loads(gzip.decompress(data) if name.endswith("gz") else data)["traceEvents"]
    named = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert len(named) == 1 + 4 * 4 and named[3, 4] == "worker 3"
    spans = [event for event in events if event["ph"] == "X"]
    run = material.runs[2]
    computing = sum(event["dur"] for event in spans if event["pid"] == 3 and event["name"] == "computing")
    assert computing / 1e6 == pytest.approx(run.seconds_by_kind["computing"], rel=1e-3)
    assert {event["name"] for event in events if event["ph"] == "i"} == {"joined", "left"}


def test_a_trace_is_as_the_format_of_trace_events_wants_it(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "one"))
    run.timeline[0]["duration"][1:-1] *= 1.01  # now each overlaps the next
    run.timeline[1]["start"] -= 1e-6
    trace = json.loads(write_trace(gather([run]), tmp_path / "trace.json").read_bytes())
    assert set(trace) == {"displayTimeUnit", "traceEvents"} and trace["displayTimeUnit"] in ("ms", "ns")
    wanted = {"X": {"ts", "dur", "args"}, "i": {"ts", "s"}, "M": {"args"}}
    for event in trace["traceEvents"]:
        assert set(event) == {"ph", "name", "pid", "tid"} | wanted[event["ph"]]
        assert all(type(event[key]) is int and event[key] >= 0 for key in ("pid", "tid", "ts", "dur") if key in event)
        assert event["pid"] > 0 and (event["tid"] > 0 or event["name"] == "process_name")
        assert event.get("s", "t") == "t"
    metadata = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    assert {event["name"]: set(event["args"]) for event in metadata} == {
        "process_name": {"name"},
        "thread_name": {"name"},
        "thread_sort_index": {"sort_index"},
    }
    for thread in {event["tid"] for event in trace["traceEvents"] if event["ph"] == "X"}:
        spans = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["tid"] == thread]
        ends = [event["ts"] + event["dur"] for event in spans]
        assert len(spans) > 2 and all(end <= after["ts"] for end, after in zip(ends, spans[1:], strict=False))


def test_a_figure_is_of_the_formats_that_its_files_name(tmp_path: Path) -> None:
    files = tmp_path / "figure.svg", tmp_path / "figure.png"
    series = Series(label="a < b", panel="", x=(1.0, 2.0), y=(3.0, 4.0), band=((2.0, 3.0), (4.0, 5.0)), style=3)
    draw("title", [series], Axis(label="x"), Axis(label="y"), *files)
    text = files[0].read_text()
    assert "a &lt; b" in text and COLOURS[3].lower() in text
    assert matplotlib.image.imread(files[1]).ndim == 3


@pytest.mark.soak
def test_figures_as_png_and_svg(tmp_path: Path) -> None:
    files = write_figures(gather(make_run(tmp_path / "one", workers=2, steps=12)), tmp_path / "figures")
    assert {file.suffix for file in files} == {".png", ".svg"} and len(files) == len(set(files))
    wanted = {"error-against-time", "error-against-bytes", "training-loss", "time", "staleness", "timeline-0"}
    assert wanted <= {file.stem for file in files}
    assert matplotlib.image.imread(tmp_path / "figures" / "timeline-0.png").ndim == 3
    assert "worker 1" in (tmp_path / "figures" / "timeline-0.svg").read_text()


@pytest.mark.soak
def test_figures_of_a_comparison_and_of_mixtures(tmp_path: Path) -> None:
    assert len(write_figures(gather(make_comparison(tmp_path / "four")), tmp_path / "four-figures")) == 26
    assert write_figures(gather(make_million(tmp_path / "million")), tmp_path / "figures")
