"""Studies: one table of all of them through one suite, their files and command, and the optimizers study."""

from __future__ import annotations

import dataclasses
import errno
import json
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import click
import matplotlib.image
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from paceline.commands.cli import main
from paceline.errors import PacelineError, UsageError
from paceline.report import look, plots
from paceline.report.series import Axis, Series
from paceline.spec import from_spec
from paceline.studies import (
    STUDIES,
    AdversariesStudy,
    BatchesOrLearnersStudy,
    CodecsStudy,
    CommunicationStudy,
    DiLoCoStudy,
    EASGDStudy,
    EffectiveBatchStudy,
    HogwildStudy,
    LocalSGDStudy,
    OptimizersStudy,
    ScalingStudy,
    SMAStudy,
    StalenessStudy,
    StragglersStudy,
    Study,
    StudyContext,
    StudyResult,
    TradeOffStudy,
    WarmUpStudy,
    files,
    optimizers,
)
from paceline.studies.files import as_json, as_markdown, check_folder, write_result
from paceline.studies.options import command_options
from paceline.studies.study import Column, option
from paceline.training.train import evaluate

SHARED_OPTIONS = {"data", "seed", "out", "json", "as_json", "help"}

# The smallest settings that fill a study's table and plot and need no data: a new study adds its line.
QUICK: dict[str, Study] = {
    "optimizers": OptimizersStudy(
        problem="digits",
        steps=30,
        evaluate_every=10,
        networks=("net1", "net2"),
        optimizers=("momentum", "adam"),
    ),
    "communication": CommunicationStudy(workers=(2, 8), messages=("4kB", "25MB")),
    "stragglers": StragglersStudy(workers=(4, 40), iterations=30),
    "trade-off": TradeOffStudy(problem="digits", policies=("sync", "async"), seconds=20.0, points=5),
    "local-sgd": LocalSGDStudy(
        problem="digits", model="net1", examples=128, workers=2, batch_size=8, epochs=1, seeds=2
    ),
    "effective-batch": EffectiveBatchStudy(
        problem="digits", model="net1", examples=128, workers=2, batch_size=8, every=(2,), epochs=1, seeds=2
    ),
    "scaling": ScalingStudy(
        problem="digits", model="net1", examples=256, workers=(1, 2), epochs=2, target=0.2, judges=100, seeds=2
    ),
    "sma": SMAStudy(
        problem="digits",
        model="net1",
        examples=256,
        learners=(2,),
        rates=(0.02,),
        epochs=2,
        target=0.2,
        judges=100,
        seeds=2,
    ),
    "diloco": DiLoCoStudy(
        problem="digits", model="net1", workers=2, every=4, steps=8, judges=100, link="1ms 10kB/s", seeds=2
    ),
    "codecs": CodecsStudy(problem="digits", model="net1", examples=256, workers=2, batch_size=2, epochs=1, seeds=2),
    "warm-up": WarmUpStudy(problem="digits", workers=8, rates=(0.1,), epochs=2, seeds=2),
    "adversaries": AdversariesStudy(
        problem="digits",
        model="net1",
        examples=256,
        workers=3,
        hostile=1,
        attacks=("sign-flip(scale=10)", "label-flip"),
        defences=("mean", "median", "k-sync(k=2)"),
        epochs=1,
        judges=100,
        seeds=2,
    ),
    "easgd": EASGDStudy(
        problem="digits",
        model="net1",
        examples=128,
        workers=2,
        periods=(1, 2),
        momenta=(0.9,),
        crowds=(2,),
        epochs=1,
        target=0.1,
        judges=50,
        seeds=2,
    ),
    "staleness": StalenessStudy(
        problem="digits", model="net1", examples=128, workers=2, rates=(0.1, 0.2), epochs=1, judges=50, seeds=2
    ),
    "hogwild": HogwildStudy(schemes=("hogwild", "cyclades"), epochs=2, cut_epochs=2, size=0.002, seeds=2),
    "batches-or-learners": BatchesOrLearnersStudy(
        problem="digits", model="net1", examples=256, workers=3, ks=(2,), rates=(0.1,), epochs=1, judges=100, seeds=2
    ),
}
WALL_CLOCK = {"hogwild"}  # their numbers are times
FORMULAS = {"communication"}  # nothing random in them, and nothing for threads to do
FORMULA_ARGUMENTS = ["study", "communication", "--workers", "2,8", "--messages", "4kB"]
QUICK_ARGUMENTS = [
    "study", "optimizers", "--problem", "digits", "--steps", "30", "--evaluate-every", "10",
    "--networks", "net1,net2", "--optimizers", "momentum,adam",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _compiled_engine(request: pytest.FixtureRequest) -> None:
    """Skip the study of the compiled engine where there is none."""
    if "hogwild" in request.node.name:
        pytest.importorskip("paceline.native._sparse", exc_type=ImportError)


@cache
def quick_result(name: str, seed: int = 0) -> StudyResult:
    return QUICK[name].run(StudyContext(seed=seed))


def without_times(values: dict[str, Any]) -> dict[str, Any]:
    names = [column["name"] for column in values["columns"]]
    kept = [place for place, name in enumerate(names) if name != "seconds"]
    return {**values, "rows": [[row[place] for place in kept] for row in values["rows"]]}


def run_main(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert isinstance(exit.value.code, int)
    return exit.value.code


# Every study ----------------------------------------------------------------------------------------------


def test_every_study_has_quick_settings_here() -> None:
    assert set(QUICK) == set(STUDIES)


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_has_name_title_help_and_defaults(name: str) -> None:
    study = STUDIES[name]
    assert study.name == name
    assert study.title and "\n" not in study.title
    assert study.__doc__
    assert str(study()) == name
    for field in dataclasses.fields(study):
        assert field.metadata["help"]
        assert field.name not in SHARED_OPTIONS


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_has_a_text_form(name: str) -> None:
    assert from_spec("study", STUDIES, str(QUICK[name])) == QUICK[name]


@pytest.mark.parametrize("name", STUDIES)
def test_a_result_is_a_whole_table_and_a_whole_plot(name: str) -> None:
    result = quick_result(name)
    assert result.rows and result.series and result.notes
    assert {len(row) for row in result.rows} == {len(result.columns)}
    for series in result.series:
        assert len(series.x) == len(series.y) > 0
        assert list(series.x) == sorted(series.x)
    pairs = [(series.panel, series.label) for series in result.series]
    assert len(set(pairs)) == len(pairs)


@pytest.mark.parametrize("name", sorted(set(STUDIES) - WALL_CLOCK))
def test_a_result_is_the_same_for_the_same_seed_apart_from_times(name: str) -> None:
    again = QUICK[name].run(StudyContext(seed=0))
    first, second = (json.loads(as_json(result)) for result in (quick_result(name), again))
    assert json.dumps(without_times(first)) == json.dumps(without_times(second))
    other = json.loads(as_json(quick_result(name, seed=1)))
    assert (without_times(other)["series"] == without_times(first)["series"]) == (name in FORMULAS)


@pytest.mark.parametrize("name", STUDIES)
def test_files_hold_the_result(name: str, tmp_path: Path) -> None:
    result = quick_result(name)
    write_result(result, tmp_path / "new" / "folder")
    folder = tmp_path / "new" / "folder"
    assert sorted(file.name for file in folder.iterdir()) == ["plot.png", "result.json", "table.md"]
    saved = json.loads((folder / "result.json").read_text())
    assert saved == json.loads(json.dumps(result.as_dict()))
    assert saved["options"] == json.loads(json.dumps(dataclasses.asdict(QUICK[name])))
    table = [line for line in (folder / "table.md").read_text().splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(result.rows)
    assert {line.count("|") for line in table} == {len(result.columns) + 1}
    image = matplotlib.image.imread(folder / "plot.png")
    assert min(image.shape[:2]) > 300
    assert (image[..., 0] != image[..., 2]).any(), "a picture in shades of grey"


@pytest.mark.parametrize("name", STUDIES)
def test_progress_grows_to_its_total(name: str) -> None:
    told: list[tuple[str, int, int]] = []
    QUICK[name].run(StudyContext(tell=lambda text, done, total: told.append((text, done, total))))
    done = [entry[1] for entry in told]
    assert done == sorted(done)
    assert {entry[2] for entry in told} == {done[-1]}
    assert all(text for text, _, _ in told)


@pytest.mark.parametrize("name", sorted(set(STUDIES) - FORMULAS))
def test_threads_are_as_before(name: str) -> None:
    torch.set_num_threads(2)
    inside = set()
    QUICK[name].run(StudyContext(tell=lambda *_: inside.add(torch.get_num_threads())))
    assert torch.get_num_threads() == 2
    assert inside == {1}

    def fail(*_: object) -> None:
        raise RuntimeError("the watcher failed")

    with pytest.raises(RuntimeError, match="the watcher failed"):
        QUICK[name].run(StudyContext(tell=fail))
    assert torch.get_num_threads() == 2


# Files ----------------------------------------------------------------------------------------------------


def small_result(**changes: Any) -> StudyResult:
    base = StudyResult(
        study=OptimizersStudy(),
        seed=0,
        columns=(Column(name="who|what"), Column(name="share", decimals=1), Column(name="count")),
        rows=(("a|b", 0.25, 1200), ("c", 1234.56, None)),
        x_axis=Axis(label="x"),
        y_axis=Axis(label="y"),
        series=(Series(label="a", panel="p", x=(1.0, 2.0), y=(1.0, 2.0)),),
    )
    return dataclasses.replace(base, **changes)


def test_markdown_escapes_bars_and_aligns_numbers() -> None:
    lines = as_markdown(small_result()).splitlines()
    assert lines[2:] == [
        "| who\\|what | share | count |",
        "| --- | ---: | ---: |",
        "| a\\|b | 0.2 | 1200 |",
        "| c | 1,234.6 | - |",
    ]


def test_a_value_that_is_no_number_is_not_written_as_json() -> None:
    with pytest.raises(ValueError, match="JSON"):
        as_json(small_result(rows=(("a", float("nan"), 1),)))


def test_a_failed_write_leaves_the_files_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_result(small_result(), tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def full_disk(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(files, "draw", full_disk)
    with pytest.raises(PacelineError, match=r"could not be written to .*no space left"):
        write_result(small_result(seed=9), tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check_folder(tmp_path)
    check_folder(tmp_path / "not" / "yet")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match="--out"):
            check_folder(folder)


# Plots ----------------------------------------------------------------------------------------------------


def test_more_labels_than_colours_still_look_different() -> None:
    styles = {
        (look.COLOURS[number % len(look.COLOURS)], look.LINES[number // len(look.COLOURS)]) for number in range(32)
    }
    assert len(styles) == 32


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_plots_draw_zeros_single_points_and_many_panels(scale: Any, tmp_path: Path) -> None:
    series = tuple(
        Series(label=f"l{number}", panel=f"p{number % 3}", x=(1.0,), y=(float(number % 2),)) for number in range(20)
    )
    axis = Axis(label="v", scale=scale)
    plots.draw("title", series, axis, axis, tmp_path / "plot.png")
    assert matplotlib.image.imread(tmp_path / "plot.png").ndim == 3


def test_a_log_axis_is_labelled_where_few_points_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    for x in ((1.0, 4.0, 16.0), tuple(map(float, range(1, 17)))):
        series = Series(label="a", panel="p", x=x, y=x)
        plots.draw("title", [series], Axis(label="x", scale="log"), Axis(label="y"), tmp_path / "plot.png")
    few, many = (figure.axes[0].get_xticks().tolist() for figure in drawn)
    assert few == [1, 4, 16]
    assert {1, 2, 5, 10} <= set(many) and 16 not in many


# Options --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sample(Study):
    """A study with an option of every kind."""

    name: ClassVar[str] = "sample"
    title: ClassVar[str] = "Sample"

    count: int = option(3, "A number.")
    rate: float = option(0.5, "A rate.")
    word: str = option("a", "A word.")
    deep: bool = option(False, "A switch.")
    limit: int | None = option(None, "A limit.")
    sizes: tuple[int, ...] = option((1, 2), "Sizes.")
    long_name: tuple[str, ...] = option(("x",), "Names.")

    def run(self, context: StudyContext) -> StudyResult:
        raise NotImplementedError


def parse(arguments: list[str]) -> Sample:
    made: list[Sample] = []
    command = click.Command(
        "sample", params=list(command_options(Sample)), callback=lambda **values: made.append(Sample(**values))
    )
    command.main(args=arguments, standalone_mode=False)
    return made[0]


def test_options_left_out_are_the_defaults() -> None:
    assert parse([]) == Sample()


@given(
    count=st.integers(-(10**9), 10**9),
    rate=st.floats(-1e6, 1e6),
    deep=st.booleans(),
    limit=st.integers(0, 10**6),
    sizes=st.lists(st.integers(-999, 999)),
    names=st.lists(st.from_regex(r"[a-z][a-z0-9-]*", fullmatch=True)),
)
def test_options_are_read_as_typed(
    count: int, rate: float, deep: bool, limit: int, sizes: list[int], names: list[str]
) -> None:
    arguments = [
        f"--count={count}", f"--rate={rate!r}", "--deep" if deep else "--no-deep", f"--limit={limit}",
        f"--sizes={', '.join(map(str, sizes))}", f"--long-name={','.join(names)}",
    ]  # fmt: skip
    wanted = Sample(count=count, rate=rate, deep=deep, limit=limit, sizes=tuple(sizes), long_name=tuple(names))
    assert parse(arguments) == wanted


@pytest.mark.parametrize("argument", ["--count=x", "--rate=y", "--sizes=1,z"])
def test_an_option_of_the_wrong_kind_is_refused(argument: str) -> None:
    with pytest.raises(click.BadParameter) as caught:
        parse([argument])
    flag, _, value = argument.partition("=")
    assert flag in caught.value.format_message() and repr(value) in caught.value.format_message()


def test_fields_of_the_wrong_type_are_refused() -> None:
    with pytest.raises(UsageError, match="steps wants a whole number"):
        OptimizersStudy(steps=1.5)  # type: ignore[arg-type]


# The command ----------------------------------------------------------------------------------------------


def test_the_command_prints_a_table_and_writes_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_main(QUICK_ARGUMENTS) == 0
    printed = capsys.readouterr()
    assert [word for word in ("momentum", "net2", "study-optimizers") if word not in printed.out] == []
    assert printed.err == ""
    saved = json.loads((tmp_path / "study-optimizers" / "result.json").read_text())
    wanted = json.loads(as_json(quick_result("optimizers")))
    assert without_times(saved) == without_times(wanted)


def test_json_is_the_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*QUICK_ARGUMENTS, "--seed", "1", "--json", "--out", str(tmp_path)]
    assert run_main(arguments) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "result.json").read_text())
    assert without_times(printed) == without_times(json.loads(as_json(quick_result("optimizers", seed=1))))


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_reader_that_goes_away_does_not_cost_the_files(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody_reads(*_: Any, **__: Any) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("paceline.studies.terminal.print_table", nobody_reads)
    monkeypatch.setattr("builtins.print", nobody_reads)
    assert run_main([*FORMULA_ARGUMENTS, *flags, "--out", str(tmp_path)]) == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["plot.png", "result.json", "table.md"]


def test_a_disk_that_is_full_does_not_cost_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_room(*_: Any) -> None:
        raise PacelineError("the results could not be written")

    monkeypatch.setattr("paceline.studies.files.write_result", no_room)
    assert run_main([*FORMULA_ARGUMENTS, "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "ring" in printed.out and "could not be written" in printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optimisers"], "no study called 'optimisers'. Did you mean 'optimizers'?"),
        (["optimizers", "--optimizers", "adamm"], "Did you mean 'adam'?"),
        (["optimizers", "--networks", "net1,net9"], "no network called 'net9'"),
        (["optimizers", "--networks", ""], "no network was named"),
        (["optimizers", "--optimizers", "adam,adam"], "named twice"),
        (["optimizers", "--steps", "many"], "--steps"),
        (["optimizers", "--steps", "0"], "steps must be at least 1, got 0"),
        (["optimizers", "--evaluate-every", "0"], "evaluate_every must be at least 1, got 0"),
        (["optimizers", "--target", "101"], "target is a percentage"),
        (["optimizers", "--target", "nan"], "target is a percentage"),
        (["optimizers", "--problem", "mnits"], "Did you mean 'mnist'?"),
        (["optimizers", "--problem", "quadratic"], "the metric of 'quadratic' is excess"),
        (["optimizers", "--problem", "digits", "--batch-size", "2000"], "batch of 2000"),
        (["optimizers", "--problem", "mnist", "--data", "nowhere"], "nowhere does not exist"),
        (["optimizers", "--no-such", "3"], "--no-such"),
    ],
)
def test_a_mistake_exits_2_with_one_line_and_writes_nothing(
    arguments: list[str], message: str, paceline: Any, tmp_path: Path
) -> None:
    ended = paceline("study", *arguments)
    assert ended.code == 2 and message in ended.err and ended.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(OptimizersStudy, "run", lambda *_: pytest.fail("the study was run"))
    assert run_main(["study", "optimizers", "--out", str(tmp_path / "file")]) == 2
    assert "--out DIR" in capsys.readouterr().err


def test_an_interrupted_study_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def interrupt_the_third(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return evaluate(*arguments)

    monkeypatch.setattr("paceline.studies.optimizers.evaluate", interrupt_the_third)
    assert run_main([*QUICK_ARGUMENTS, "--out", str(tmp_path / "out")]) == 130
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


def test_help_lists_the_studies_and_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(["study"]) == 0
    assert "optimizers" in capsys.readouterr().out
    for name, study in STUDIES.items():
        assert run_main(["study", name, "--help"]) == 0
        shown = capsys.readouterr().out
        flags = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(study)]
        assert [flag for flag in [*flags, "--out", "--seed", "--data", "--json"] if flag not in shown] == []


def test_help_does_not_load_the_studies(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "paceline.studies", None)  # an import of it would now fail
    assert run_main(["--help"]) == 0
    assert "study" in capsys.readouterr().out


# The optimizers study -------------------------------------------------------------------------------------


def digits_study(**changes: Any) -> OptimizersStudy:
    settings = {"problem": "digits", "steps": 30, "networks": ("net1",), "optimizers": ("adam",)}
    return OptimizersStudy(**{**settings, **changes})


def test_evaluations_come_at_their_period_and_at_the_end() -> None:
    (series,) = digits_study(evaluate_every=7).run(StudyContext()).series
    assert list(series.x) == [7, 14, 21, 28, 30]
    (series,) = digits_study(steps=80).run(StudyContext()).series
    assert list(series.x) == list(range(2, 81, 2))


def test_a_run_does_not_depend_on_the_runs_before_it() -> None:
    alone = digits_study().run(StudyContext()).series[0]
    assert alone in digits_study(optimizers=("momentum", "rmsprop", "adam")).run(StudyContext()).series
    assert alone in digits_study(networks=("net2", "net1")).run(StudyContext()).series


def test_the_table_agrees_with_the_curves() -> None:
    result = digits_study(optimizers=tuple(optimizers.OPTIMIZERS), target=60.0).run(StudyContext())
    reached = []
    for row, series in zip(result.rows, result.series, strict=True):
        accuracy = [round(100 - error, 4) for error in series.y]
        steps = [step for step, value in zip(series.x, accuracy, strict=True) if value >= 60]
        assert row[:5] == ("net1", series.label, accuracy[-1], max(accuracy), steps[0] if steps else None)
        reached += steps[:1]
    assert reached, "no optimizer reached the target"


def test_every_optimizer_of_the_table_learns_digits() -> None:
    result = digits_study(
        steps=150, networks=("net2",), optimizers=tuple(optimizers.OPTIMIZERS), evaluate_every=50
    ).run(StudyContext())
    for row in result.rows:
        assert isinstance(row[3], float) and row[3] > 70, row


def test_the_default_is_the_deck_with_plain_sgd_and_its_seven_optimizers() -> None:
    study = OptimizersStudy()
    assert (study.problem, study.batch_size, study.steps) == ("mnist", 128, 20_000)
    assert study.networks == ("net1", "net2", "net3")
    assert study.optimizers == tuple(optimizers.OPTIMIZERS)
    assert study.optimizers[0] == "sgd" and len(study.optimizers) == 8


def test_a_run_that_diverges_is_stopped_and_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(optimizers.OPTIMIZERS, "sgd", "sgd(lr=1e38)")
    result = digits_study(optimizers=("sgd", "adam"), evaluate_every=5).run(StudyContext())
    assert [series.x[-1] for series in result.series] == [5, 30]
    assert result.notes[-1] == "sgd on net1 was stopped after 5 steps: its loss was no longer finite."
    json.loads(as_json(result))


def test_a_problem_in_a_file_is_studied_too(tmp_path: Path) -> None:
    file = tmp_path / "mine_to_study.py"
    file.write_text(
        "from paceline.problems import load_problem\n\n\ndef problem():\n    return load_problem('digits')\n"
    )
    own, built_in = (digits_study(problem=name).run(StudyContext()) for name in (str(file), "digits"))
    assert own.series == built_in.series


@pytest.mark.data
def test_mnist_is_learned(data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--steps", "60", "--networks", "net1", "--optimizers", "nesterov", "--evaluate-every", "60"]
    out = ["--data", str(data_dir), "--out", str(tmp_path), "--json"]
    assert run_main(["study", "optimizers", *arguments, *out]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row[2] > 80
