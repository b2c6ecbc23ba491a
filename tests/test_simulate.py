"""The command ``simulate`` and the studies made of it: tables, JSON, mistakes, targets and breaking off."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from quick import in_turn

from paceline.commands.cli import main
from paceline.errors import UsageError
from paceline.studies import StragglersStudy, StudyContext, TradeOffStudy
from paceline.studies.files import write_result
from paceline.studies.options import split_outside_brackets
from paceline.studies.simulation import Simulation
from paceline.virtual.tally import Tally


@pytest.fixture
def simulate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """The command in a directory of its own: its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PACELINE_DATA", raising=False)

    def call(*arguments: str) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(["simulate", *arguments])
        return caught.value.code, *capsys.readouterr()

    return call


def test_the_table_is_whole_on_a_narrow_terminal(simulate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    code, out, _ = simulate("--commits", "50")
    assert code == 0
    for word in ("sync", "k-sync(k=4)", "k-async(k=4)", "async", "1+exp(0.5)", "6.4357", "efficiency", "wasted"):
        assert word in out
    assert "…" not in out
    assert sorted(file.name for file in Path("simulation").iterdir()) == ["plot.png", "result.json", "table.md"]


def test_older_results_are_kept(simulate: Any) -> None:
    outs = [simulate("--policies", "sync", "--commits", commits)[1] for commits in ("5", "6", "7")]
    folders = ["simulation", "simulation-2", "simulation-3"]
    assert [out.splitlines()[-1].split()[-1] for out in outs] == folders
    results = [json.loads(Path(folder, "result.json").read_text()) for folder in folders]
    assert [result["options"]["commits"] for result in results] == [5, 6, 7]


def test_a_directory_that_was_named_is_written_over(simulate: Any) -> None:
    for commits in (5, 6):
        assert simulate("--policies", "sync", "--commits", str(commits), "--out", "mine")[0] == 0
        assert json.loads(Path("mine/result.json").read_text())["options"]["commits"] == commits


def test_policies_times_workers_times_delays(simulate: Any) -> None:
    code, out, _ = simulate(
        "--json", "--policies", "sync,k-batch-async(k=2)", "--workers", "2,4", "--commits", "40",
        "--delays", "exp(1),1 factors(1, 2)", "--size", "1MB",
    )  # fmt: skip
    found = json.loads(out)
    assert code == 0 and len(found["rows"]) == 8
    assert [(row[0], row[1], row[2]) for row in found["rows"]][:3] == [
        ("sync", 2, "exp(1)"),
        ("k-batch-async(k=2)", 2, "exp(1)"),
        ("sync", 4, "exp(1)"),
    ]
    record = found["records"][1]
    assert sum(record["staleness_histogram"].values()) == record["pushes"] == 80
    assert record["bytes_in"] == 80e6
    assert {series["panel"] for series in found["series"]} == {"delay exp(1)", "delay 1 factors(1, 2)"}


def test_the_same_seed_prints_the_same_bytes(simulate: Any) -> None:
    arguments = ("--json", "--commits", "30")
    problem = (*arguments, "--problem", "logistic", "--seconds", "20")
    assert simulate(*arguments) == simulate(*arguments)
    assert simulate(*problem) == simulate(*problem)
    assert simulate(*arguments)[1] != simulate(*arguments, "--seed", "1")[1]


def test_bytes_are_only_counted_of_parameters_with_a_size(simulate: Any) -> None:
    shown = []
    for size in ([], ["--size", "2MB"]):
        found = json.loads(simulate("--json", "--policies", "sync", "--workers", "2", "--commits", "5", *size)[1])
        place = [column["name"] for column in found["columns"]].index("MB/commit")
        shown.append(found["rows"][0][place])
    assert shown == [None, 8.8]  # 2 workers get the parameters six times and push five times


def test_formulas_alone(simulate: Any) -> None:
    code, out, _ = simulate(
        "--json", "--depth", "formula", "--workers", "8,16", "--policies", "sync,k-async(k=2),async"
    )
    rows = json.loads(out)["rows"]
    assert code == 0
    assert rows[0] == ["sync", 8, "1+exp(0.5)", pytest.approx(6.4357, abs=1e-4), 0.0]
    assert rows[1] == ["k-async(k=2)", 8, "1+exp(0.5)", None, 3.0]


def test_strong_and_weak_scaling(simulate: Any) -> None:
    arguments = ("--json", "--policies", "all-reduce", "--workers", "1,8", "--delays", "1", "--examples", "64")
    link = ("--link", "1GB/s", "--size", "100MB", "--commits", "20")
    weak, strong = (json.loads(simulate(*arguments, *link, "--scaling", kind)[1]) for kind in ("weak", "strong"))
    names = [column["name"] for column in weak["columns"]]
    scaling, parallel = names.index("scaling efficiency %"), names.index("parallel efficiency %")
    for efficiency in (scaling, parallel):
        assert weak["rows"][0][efficiency] == strong["rows"][0][efficiency] == pytest.approx(100)
    assert 100 > weak["rows"][1][parallel] > strong["rows"][1][parallel] > 10
    assert weak["rows"][1][scaling] == pytest.approx(weak["rows"][1][parallel])
    assert strong["rows"][1][scaling] == pytest.approx(8 * strong["rows"][1][parallel])


def test_error_against_virtual_time(simulate: Any) -> None:
    code, out, _ = simulate(
        "--json", "--problem", "logistic", "--policies", "sync,async,ada-sync(window=5)", "--seconds", "120",
        "--target", "0.6", "--points", "12",
    )  # fmt: skip
    found = json.loads(out)
    assert code == 0 and found["missing"] is None
    assert found["columns"][-1]["name"] == "s to 0.6"
    for row, record, series in zip(found["rows"], found["records"], found["series"], strict=True):
        assert 0 <= row[-1] <= 120
        assert [point["seconds"] for point in record["curve"]] == series["x"] == [10.0 * n for n in range(13)]
        assert record["parallel_efficiency"] <= 1.1


@pytest.mark.parametrize("problem", [(), ("--problem", "logistic", "--seconds", "40")])
def test_peers_with_and_without_a_problem_have_the_same_columns(simulate: Any, problem: tuple[str, ...]) -> None:
    code, out, _ = simulate("--json", "--policies", "all-reduce,local-sgd(every=8),sync", "--workers", "4", *problem)
    found = json.loads(out)
    assert code == 0 and [row[0] for row in found["rows"]] == ["all-reduce", "local-sgd(every=8)", "sync"]
    together, local, served = found["records"]
    assert together.keys() == local.keys() == served.keys()
    assert local["waiting"] < together["waiting"] and local["iteration"] < together["iteration"]
    assert [point["seconds"] for point in local["curve"]] == [point["seconds"] for point in served["curve"]]


def test_a_target_never_reached_is_an_error_after_all_is_shown(simulate: Any) -> None:
    code, out, err = simulate("--problem", "logistic", "--policies", "sync,async", "--seconds", "10", "--target", "1")
    assert code == 1
    assert "sync" in out and "accuracy" in out
    assert "accuracy 1 was not reached by sync, async within 10 virtual seconds; give more with --seconds" in err


MISTAKES: dict[str, tuple[list[str], str]] = {
    "policy": (["--policies", "k-snc(k=3)"], "Did you mean 'k-sync'"),
    "k of nothing": (["--policies", "k-sync(k=0)"], "k must be at least 1"),
    "k of too many": (["--policies", "k-sync(k=9)"], "needs 9 workers, but the run has 8"),
    "a policy that follows the loss": (["--policies", "ada-sync"], "--problem digits"),
    "no policy": (["--policies", ","], "--policies is empty.*sync"),
    "delay": (["--delays", "1+exq(2)"], "cannot read the delay.*Examples"),
    "negative delay": (["--delays", "-1"], "negative.*Examples"),
    "link": (["--link", "quick"], "cannot read the link.*Examples"),
    "size": (["--size", "big"], "big"),
    "workers": (["--workers", "0"], "at least 1 worker"),
    "workers that are no numbers": (["--workers", "few"], "few"),
    "commits": (["--commits", "0"], "commits must be at least 1"),
    "seconds": (["--problem", "digits", "--seconds", "0"], "seconds must be above 0"),
    "commits of a problem": (["--problem", "digits", "--commits", "5"], "--commits.*--seconds"),
    "seconds without a problem": (["--seconds", "5"], "--seconds.*--commits"),
    "model without a problem": (["--model", "net1"], "--model is for.*--problem digits"),
    "problem": (["--problem", "digit"], "Did you mean 'digits'"),
    "target without problem": (["--target", "0.9"], "name the problem too"),
    "depth": (["--depth", "formule"], "Did you mean 'formula'"),
    "formula of a problem": (["--depth", "formula", "--problem", "digits"], "--depth formula does not train a problem"),
    "no formula": (["--depth", "formula", "--policies", "ssp(bound=1)"], "no formula is known for any"),
    "scaling": (["--scaling", "stron"], "Did you mean 'strong'"),
    "strong scaling of a problem": (
        ["--scaling", "strong", "--problem", "digits", "--examples", "8"],
        "strong scaling is for runs without a problem",
    ),
    "hosts": (["--hosts", "3"], "cannot be spread evenly over 3 hosts"),
    "too short for a commit": (["--problem", "logistic", "--seconds", "0.1"], "made no commit within 0.1 s"),
    "a clock that stands still": (
        ["--problem", "quadratic", "--policies", "sync", "--delays", "0", "--seconds", "3"],
        "clock stands still at 0 s.*--delays 1",
    ),
    "more buckets than can be": (
        ["--policies", "all-reduce", "--size", "1e17B", "--link", "1GB/s"],
        "3,?8.* buckets.*bucket_cap_mb",
    ),
    "a message for ever": (["--policies", "all-reduce", "--size", "1e290TB", "--link", "1B/s"], "takes 1e.302 s"),
    "latency for ever": (["--link", "1e308s"], "takes 1e.308 s"),
    "latency inside for ever": (["--policies", "all-reduce", "--inside", "1e308s"], "takes 1e.308 s"),
    "bandwidth beyond floats": (["--link", "1e309GB/s"], "that a float can hold, found 1e309"),
    "notice for ever": (["--notice", "1e308"], "notice.*got 1e.308"),
    "too many workers": (["--workers", "10000000000"], "at most 1,000,000 workers, got 10,000,000,000"),
    "too many for a formula": (
        ["--depth", "formula", "--policies", "sync", "--workers", "10000000000"],
        "at most 1,000,000 workers",
    ),
    "all fail": (["--workers", "1", "--policies", "async", "--delays", "1 fails(0, 2.5)"], "standstill at"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_line(simulate: Any, case: str) -> None:
    arguments, complaint = MISTAKES[case]
    code, out, err = simulate(*arguments)
    assert code == 2 and out == ""
    assert err.count("\n") == 1 and re.search(complaint, err), err


# Breaking off -----------------------------------------------------------------------------------------------


@pytest.fixture
def broken_off(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the user press Ctrl-C at a commit, counted over all runs."""

    commit_before = Tally.commit

    def at(commit: int) -> None:
        left = [commit]

        def interrupted(*arguments: Any) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            commit_before(*arguments)

        monkeypatch.setattr(Tally, "commit", interrupted)

    return at


def test_breaking_off_prints_what_is_known(simulate: Any, broken_off: Any) -> None:
    broken_off(150)
    code, out, err = simulate("--json", "--commits", "100")
    found = json.loads(out)
    assert code == 130
    assert found["interrupted"] is True
    assert [row[0] for row in found["rows"]] == ["sync", "k-sync(k=4)"]
    assert [record["commits"] for record in found["records"]] == [100, 49]
    assert "interrupted in run 2 of 4" in err
    assert json.loads(Path("simulation/result.json").read_text()) == found


def test_breaking_off_with_a_problem(simulate: Any, broken_off: Any) -> None:
    broken_off(30)
    code, out, _ = simulate("--problem", "logistic", "--policies", "async,sync", "--seconds", "100")
    assert code == 130 and "async" in out and "accuracy" in out


def test_breaking_off_before_anything_is_known(simulate: Any, broken_off: Any) -> None:
    broken_off(1)
    code, out, err = simulate()
    assert (code, out) == (130, "")
    assert re.fullmatch(
        r"paceline: interrupted in run 1 of 4, at [1-9][.0-9]* virtual seconds, before its first commit\n", err
    )


def test_breaking_off_before_the_first_commit_of_a_later_run(simulate: Any, broken_off: Any) -> None:
    broken_off(101)
    code, out, err = simulate("--json", "--commits", "100")
    assert code == 130 and [row[0] for row in json.loads(out)["rows"]] == ["sync"]
    assert "interrupted in run 2 of 4" in err and "before its first commit" in err


PRESS_WHILE_IMPORTING = """
import runpy, signal, sys

class Press:
    def find_spec(self, name, path, target=None):
        if name == module:
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:  # torch and numpy lose it like this in some places
                pass

signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the tests were started with
module = sys.argv.pop(1)
sys.meta_path.insert(0, Press())
runpy.run_module("paceline", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("module", "command"),
    in_turn(
        ["click", "numpy", "torch", "torch.distributed", "paceline.studies.terminal"],
        [["simulate", "--commits", "5"], ["study", "stragglers", "--iterations", "5"]],
    ),
)
def test_ctrl_c_while_importing_is_not_lost(command: list[str], module: str, tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", PRESS_WHILE_IMPORTING, module, *command], capture_output=True, text=True, cwd=tmp_path
    )
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "paceline: interrupted\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("times", [1, 3])
def test_ctrl_c_in_a_run_ends_it_with_what_is_known(times: int, simulate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    count_commit, write = Tally.commit, write_result

    def press_at_the_tenth(tally: Tally, *arguments: Any) -> None:
        count_commit(tally, *arguments)
        if len(tally.commit_times) == 10:
            signal.raise_signal(signal.SIGINT)

    def press_again(*arguments: Any) -> None:
        for _ in range(times - 1):
            signal.raise_signal(signal.SIGINT)
        write(*arguments)

    monkeypatch.setattr(Tally, "commit", press_at_the_tenth)
    monkeypatch.setattr("paceline.studies.files.write_result", press_again)
    before = signal.getsignal(signal.SIGINT)
    code, out, err = simulate("--json")
    assert code == 130 and err.count("\n") == 1 and "in run 1 of 4" in err
    assert [record["commits"] for record in json.loads(out)["records"]] == [10]
    assert Path("simulation/result.json").exists()
    assert signal.getsignal(signal.SIGINT) is before


def test_the_second_ctrl_c_breaks_into_a_step(simulate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def press_for_ever(*arguments: Any) -> None:
        for _ in range(5):
            signal.raise_signal(signal.SIGINT)
        pytest.fail("the step went on")

    monkeypatch.setattr(Tally, "commit", press_for_ever)
    code, out, err = simulate()
    assert (code, out) == (130, "") and "before its first commit" in err


def test_ctrl_c_while_results_are_written_lets_them_be_written(simulate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def press(*arguments: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        write_result(*arguments)

    monkeypatch.setattr("paceline.studies.files.write_result", press)
    code, out, err = simulate("--json", "--commits", "5")
    assert code == 130 and len(json.loads(out)["rows"]) == 4
    assert err == "paceline: interrupted after all measurements; the results are complete\n"
    assert Path("simulation/plot.png").exists()


def test_studies_broken_off(broken_off: Any, tmp_path: Path) -> None:
    broken_off(200)
    found = StragglersStudy(workers=(4, 8, 16), iterations=50).run(StudyContext())
    assert [row[0] for row in found.rows] == [4] and found.interrupted
    write_result(found, tmp_path)
    broken_off(25)
    other = TradeOffStudy(problem="logistic", model="net1", seconds=30.0).run(StudyContext())
    assert len(other.rows) == 2 and other.interrupted
    for study in (StragglersStudy(), TradeOffStudy(problem="digits")):
        broken_off(1)
        with pytest.raises(KeyboardInterrupt):
            study.run(StudyContext())


# The studies ------------------------------------------------------------------------------------------------


def test_stragglers_are_as_slow_as_the_formula_says() -> None:
    found = StragglersStudy(workers=(10, 100), iterations=400).run(StudyContext())
    names = [column.name for column in found.columns]
    for row, exact in zip(found.rows, (6.858, 11.375), strict=True):
        values: dict[str, Any] = dict(zip(names, row, strict=True))
        assert row[names.index("formula")] == pytest.approx(exact, abs=1e-3)
        assert values["off %"] < 5
        assert 2 < values["slowest/mean"] < values["slowest/fastest"]
    hundred: dict[str, Any] = dict(zip(names, found.rows[1], strict=True))
    assert (hundred["backup workers"], hundred["formula"]) == (4, pytest.approx(7.21, abs=0.01))


def test_times_without_a_formula_can_be_studied_too() -> None:
    delay = "lognormal(median=1, sigma=1)"
    found = StragglersStudy(workers=(4, 8), delay=delay, iterations=20).run(StudyContext())
    assert all(row[3] is None and row[4] is None for row in found.rows)
    assert len(found.series) == 3


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"workers": (1,)}, "workers must be different numbers from 2"),
        ({"workers": (5, 5)}, "workers must be different numbers"),
        ({"iterations": 1}, "iterations must be at least 2"),
        ({"backup": 0.0}, "percentage"),
        ({"delay": "1+"}, "cannot read the delay"),
    ],
)
def test_mistakes_of_stragglers(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        StragglersStudy(**options)


def test_simulation_has_a_text_form_and_brackets_keep_commas() -> None:
    assert str(Simulation()) == "simulate"
    assert split_outside_brackets("a(b, c),d,(e, (f, g))") == ["a(b, c)", "d", "(e, (f, g))"]
    assert split_outside_brackets("a),b") == ["a)", "b"]
