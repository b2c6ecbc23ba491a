"""The report in a real browser, if there is one: it draws, zooms, can be read in the dark and on a phone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, Page
from made_runs import make_comparison, make_million, make_run
from test_report_page import HOSTILE

from paceline.report.page import write_report

FIGURES = {"Error against time", "Error against examples", "Error against bytes", "Where the workers' time goes"}
FIGURES |= {"Throughput", "Scaling efficiency", "Pushes by staleness", "Training loss against time"}

# The marks of every figure: shapes in the colour of a series or of a kind of time.
MARKS = """
Object.fromEntries([...document.querySelectorAll(".panel")].map((panel) => [
  panel.querySelector("h3").textContent,
  panel.querySelectorAll("path.line, path.marker, rect.fill, .figure rect[class^=kind], .figure rect[fill]").length,
]))
"""

# All elements with text of their own whose contrast against what is behind them is below 4.5 (large text: 3).
PALE = """
(() => {
  const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => {
    const linear = [r, g, b].map((each) => (each /= 255) <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const behind = (element) => {
    for (; element; element = element.parentElement) {
      const colour = parse(getComputedStyle(element).backgroundColor);
      if (colour.length < 4 || colour[3] > 0.99) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || ["script", "style", "noscript", "option", "title"].includes(element.localName)) continue;
    const style = getComputedStyle(element);
    const [a, b] = [parse(element instanceof SVGElement ? style.fill : style.color), behind(element)].map(light);
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < (parseFloat(style.fontSize) >= 24 ? 3 : 4.5)) found.push([element.textContent, contrast]);
  }
  return found;
})()
"""

# The texts of a figure that overlap each other.
OVERLAPS = """
[...document.querySelectorAll("svg.figure")].flatMap((figure) => {
  const texts = [...figure.querySelectorAll("text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
  const across = (one, two) => one.left < two.right - 1 && two.left < one.right - 1;
  const down = (one, two) => one.top < two.bottom - 2 && two.top < one.bottom - 2;
  return texts.flatMap(([a, one], k) =>
    texts.slice(k + 1).filter(([, two]) => across(one, two) && down(one, two)).map(([b]) => [a, b]));
})
"""

# The elements that reach beyond the window, but for those that are scrolled inside a box or not shown.
TOO_WIDE = """
[...document.querySelectorAll("body *")]
  .filter((each) => each.getBoundingClientRect().right > innerWidth + 1)
  .filter((each) => !each.closest(".scrolled, .visually-hidden, thead"))
  .map((each) => each.outerHTML.slice(0, 80))
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of the report of a comparison."""
    return write_report(make_comparison(tmp_path_factory.mktemp("runs") / "four")).as_uri()


def view(page: Page) -> dict[str, float]:
    page.settle()
    seen: dict[str, float] = page.run("Paceline.shownTimelines[0].view")
    return seen


def press(page: Page, name: str) -> None:
    """Press a button of a switch."""
    page.run(f"[...document.querySelectorAll('.switch button')].find((each) => each.textContent === '{name}').click()")


def length(page: Page) -> float:
    return view(page)["to"] - view(page)["from"]


def colours_of_canvas(page: Page) -> int:
    script = """(() => { const canvas = document.querySelector("canvas");
      const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      return new Set(new Uint32Array(data.buffer)).size; })()"""
    return int(page.run(script))


def test_every_figure_has_marks_without_errors_and_requests(browser: Browser, report: str) -> None:
    with browser.page(report) as page:
        marks = page.run(MARKS)
        assert set(marks) == FIGURES and all(count >= 5 for count in marks.values()), marks
        assert colours_of_canvas(page) > 5
        assert page.run("document.querySelectorAll('table.cards tbody tr').length") == 5
        assert page.run(OVERLAPS) == []
        assert page.complaints == [] and page.requests == []


@pytest.mark.parametrize("dark", [pytest.param(False, marks=pytest.mark.soak), True])
def test_all_text_has_contrast(dark: bool, browser: Browser, report: str) -> None:
    with browser.page(report, dark=dark) as page:
        assert page.run(PALE) == []
        assert page.run("getComputedStyle(document.body).backgroundColor") == (
            "rgb(21, 24, 28)" if dark else "rgb(255, 255, 255)"
        )
        press(page, "light" if dark else "dark")
        assert page.run("getComputedStyle(document.body).backgroundColor") == (
            "rgb(255, 255, 255)" if dark else "rgb(21, 24, 28)"
        )
        assert page.run(PALE) == []


@pytest.mark.parametrize("width", [360, *(pytest.param(width, marks=pytest.mark.soak) for width in (390, 768))])
def test_a_narrow_window_is_not_scrolled_sideways(width: int, browser: Browser, report: str) -> None:
    with browser.page(report, width=width, height=800) as page:
        assert page.run("document.documentElement.scrollWidth") <= width
        assert page.run(TOO_WIDE) == []
        assert page.run(OVERLAPS) == []


def test_the_timeline_is_zoomed_and_moved_by_mouse_keys_and_buttons(browser: Browser, report: str) -> None:
    with browser.page(report) as page:
        page.run("document.querySelector('canvas').scrollIntoView({behavior: 'instant', block: 'center'})")
        page.settle()
        area = page.run("document.querySelector('canvas').getBoundingClientRect().toJSON()")
        x, y = area["x"] + area["width"] / 2, area["y"] + area["height"] / 2
        whole = length(page)
        wheel = (
            "document.querySelector('canvas').dispatchEvent(new WheelEvent('wheel', {deltaY: -300, cancelable: true}))"
        )
        assert page.run(wheel) and length(page) == whole, "a reader who scrolls past it must not be caught"
        page.click(x, y)
        page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-300)
        page.wait_for("Paceline.shownTimelines[0].view.from > 0")
        zoomed = view(page)
        assert length(page) == pytest.approx(whole / 2.718, rel=0.01)
        page.mouse("mousePressed", x, y, button="left", clickCount=1)
        page.mouse("mouseMoved", x - 100, y, button="left", buttons=1)
        page.mouse("mouseReleased", x - 100, y, button="left", clickCount=1)
        assert view(page)["from"] > zoomed["from"] and length(page) == pytest.approx(zoomed["to"] - zoomed["from"])
        page.press("+", "+")
        assert length(page) == pytest.approx(whole / 2.718 / 2, rel=0.01)
        page.press("ArrowLeft")
        page.press("0", "0")
        assert length(page) == pytest.approx(whole)
        page.run("document.querySelector('button[aria-label=\"zoom in\"]').click()")
        assert length(page) == pytest.approx(whole / 2)
        page.mouse("mouseMoved", x, y)
        page.settle()
        assert "worker" in page.run("document.querySelector('.timeline .reading').textContent")
        page.press("ArrowDown")
        page.press(".", ".")
        assert page.run("document.querySelector('.timeline [role=status]').textContent").startswith("worker 0")
        assert page.complaints == []


def test_the_timeline_is_zoomed_by_two_fingers(browser: Browser, report: str) -> None:
    with browser.page(report, width=390, height=800) as page:
        page.run("document.querySelector('canvas').scrollIntoView({behavior: 'instant', block: 'center'})")
        page.settle()
        y = page.run("document.querySelector('canvas').getBoundingClientRect().y") + 40
        whole = length(page)
        for kind, spread in (("touchStart", 20), ("touchMove", 40), ("touchMove", 80), ("touchEnd", 0)):
            points = [{"x": 200 - spread, "y": y, "id": 0}, {"x": 200 + spread, "y": y, "id": 1}] if spread else []
            page.call("Input.dispatchTouchEvent", type=kind, touchPoints=points)
        assert length(page) == pytest.approx(whole / 4, rel=0.1)


def test_another_run_and_another_scale_are_shown(browser: Browser, report: str) -> None:
    with browser.page(report) as page:
        before = page.run("document.querySelector('path.line').getAttribute('d')")
        press(page, "linear")
        assert page.run("document.querySelector('path.line').getAttribute('d')") != before
        rows = "[...document.querySelectorAll('.timeline-row')].map((each) => each.querySelectorAll('tbody tr').length)"
        assert page.run(rows) == [4, 4], "a second policy is beside the first"
        names = page.run("[...document.querySelectorAll('.printed')].map((each) => each.textContent)")
        assert len(set(names)) == 2 and all(names)
        page.run("document.querySelector('select').value = 0")
        page.run("document.querySelector('select').dispatchEvent(new Event('change'))")
        assert page.run(rows) == [1, 4]
        page.run("document.querySelectorAll('select')[1].value = 4")
        page.run("document.querySelectorAll('select')[1].dispatchEvent(new Event('change'))")
        page.run("Paceline.shownTimelines[1].zoom(0.5)")
        one, other = page.run("Paceline.shownTimelines.map((each) => each.view)")
        assert one == other and one["from"] > 0, "both have one scale of time"
        link = "document.querySelector('a[download=\"summary.csv\"]')"
        page.run(f"{link}.focus()")
        assert page.run(f"decodeURIComponent({link}.href)").startswith("data:text/csv;charset=utf-8,policy,seeds")
        assert page.complaints == []


@pytest.mark.parametrize("kind", [pytest.param("run", marks=pytest.mark.soak), "comparison"])
def test_hostile_texts_stay_texts(kind: str, browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "hostile"
    made = make_comparison(path, seeds=[0], text=HOSTILE) if kind == "comparison" else make_run(path, text=HOSTILE)
    if kind == "comparison":
        header = json.loads((made / "comparison.json").read_text())
        header["runs"][0] |= {"status": "failed", "error": HOSTILE}
        (made / "comparison.json").write_text(json.dumps(header))
    with browser.page(write_report(made).as_uri()) as page:
        assert page.run("document.querySelectorAll('img, iframe, object').length") == 0
        assert page.run("document.querySelectorAll('script').length") == 2
        assert HOSTILE in page.run("document.querySelector('h1').textContent")
        assert page.complaints == [] and page.requests == []


def damaged(path: Path, what: str) -> Path:
    if what == "nothing measured":
        (path / "metrics.jsonl").write_text("")
        for file in (path / "timeline").iterdir():
            file.unlink()
    elif what == "no timeline":
        for file in (path / "timeline").iterdir():
            file.unlink()
    elif what == "no metrics":
        (path / "metrics.jsonl").unlink()
    elif what == "one evaluation":
        lines = (path / "metrics.jsonl").read_text().splitlines()
        (path / "metrics.jsonl").write_text("\n".join(lines[:7]) + "\n")
    return path


@pytest.mark.parametrize(
    "what",
    [
        "nothing measured",
        *(pytest.param(what, marks=pytest.mark.soak) for what in ("no timeline", "no metrics", "one evaluation")),
    ],
)
def test_a_page_of_a_broken_run_is_never_blank(what: str, browser: Browser, tmp_path: Path) -> None:
    with browser.page(write_report(damaged(make_run(tmp_path / "one"), what)).as_uri()) as page:
        assert len(page.run("document.querySelector('main').innerText")) > 500
        assert page.run("document.querySelectorAll('.message, .empty, .figure').length") > 3
        assert page.complaints == []


def test_a_comparison_without_any_run_yet_says_so(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "comparison.json").write_text(
        json.dumps({"format": 1, "problem": "digits", "runs": [{"policy": "async", "status": "waiting"}]})
    )
    with browser.page(write_report(tmp_path).as_uri()) as page:
        text = page.run("document.querySelector('main').innerText")
        assert "There is no run to show yet." in text and "0 of 1 runs are made, 1 waiting" in text
        assert page.complaints == []


def test_on_paper_all_is_light_and_without_controls(browser: Browser, report: str) -> None:
    with browser.page(report, dark=True) as page:
        page.call(
            "Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}]
        )
        page.run("dispatchEvent(new Event('beforeprint'))")
        assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        shown = page.run(
            "[...document.querySelectorAll('.controls, .switch')].filter((each) => each.offsetParent).length"
        )
        assert shown == 0
        pixel = page.run("[...document.querySelector('canvas').getContext('2d').getImageData(2, 2, 1, 1).data].join()")
        assert pixel == "0,0,0,0"
        assert page.run(PALE) == []


@pytest.mark.soak
def test_a_million_spans_are_drawn_in_a_moment(browser: Browser, tmp_path: Path) -> None:
    with browser.page(write_report(make_million(tmp_path / "million")).as_uri()) as page:
        script = """(() => {
          const began = performance.now();
          for (let k = 0; k < 10; k++) Paceline.shownTimelines[0].draw();
          return (performance.now() - began) / 10;
        })()"""
        whole: Any = page.run(script)
        page.run("Paceline.shownTimelines[0].zoom(0.05)")
        page.settle()
        print(f"{whole:.1f} ms for the whole run, {page.run(script):.1f} ms zoomed in 20 times")
        assert colours_of_canvas(page) > 3 and page.complaints == []
