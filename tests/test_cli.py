"""The command: one line and exit 2 for a mistake, one object for machines, the same bytes for the same seed."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import ENVIRONMENT
from same_bits import assert_same, metrics_of

from paceline.launch.service import ServerOptions
from paceline.record.checkpoint import CheckpointFolder, read_checkpoint
from paceline.record.metrics import MetricsWriter
from paceline.record.run import Run
from paceline.version import __version__

QUICK = ("train", "quadratic", "--batch-size", "512", "--epochs", "2")  # 16 updates


MISTAKES: dict[str, tuple[list[str], str]] = {
    "command": (["trian"], "Did you mean 'train'"),
    "command that is only for supervisors": (
        ["train-workr"],
        r"Known: bench, compare, .*, run, .*, study, train, watch\.$",
    ),
    "bench of something": (["bench", "speed"], "Known: codecs, collectives, server, step"),
    "option": (["train", "--epoch", "3"], "--epochs"),
    "option without a value": (["train", "--epochs"], "--epochs"),
    "argument too many": (["train", "digits", "mnist"], "mnist"),
    "problem": (["train", "digit"], "Did you mean 'digits'"),
    "problem file": (["train", "nowhere/mine.py"], "nowhere/mine.py"),
    "bench's ranks": (["bench", "collectives", "--ranks", "1"], "--ranks must be at least 2, got 1"),
    "bench's seconds": (["bench", "collectives", "--seconds", "-1"], "--seconds must be above 0 and finite, got -1"),
    "bench's model": (["bench", "step", "--models", "net9"], "Did you mean 'net"),
    "bench's rounds": (["bench", "step", "--rounds", "0"], "at least 1"),
    "policy": (["train", "--policy", "all-redce"], "Did you mean 'all-reduce'"),
    "policy's option": (["train", "--policy", "all-reduce(overlp=true)"], "overlap"),
    "policy's form": (["train", "--policy", "all-reduce("], "all-reduce"),
    "k above the workers": (["train", "--workers", "2", "--policy", "k-sync(k=3)"], "a commit needs 3 workers"),
    "optimizer": (["train", "--optimizer", "adm(lr=0.1)"], "Did you mean 'adam'"),
    "optimizer's option": (["train", "--optimizer", "sgd(momentm=0.9)"], "momentum"),
    "optimizer's value": (["train", "--optimizer", "sgd(lr=-1)"], "lr|learning rate"),
    "model": (["train", "--model", "nett1"], "Did you mean 'net1'"),
    "missing data": (["train", "mnist"], "train-images-idx3-ubyte.*--data"),
    "data directory without the files": (["train", "mnist", "--data", "."], r"train-images-idx3-ubyte.*\."),
    "data directory that is not there": (["train", "cifar10", "--data", "nowhere"], "nowhere does not exist"),
    "text that is not there": (["train", "charlm", "--data", "nowhere.txt"], "nowhere.txt"),
    "batch larger than the data": (["train", "--batch-size", "2000"], "2000.*1437"),
    "batch of nothing": (["train", "--batch-size", "0"], "at least 1, got 0"),
    "epochs": (["train", "--epochs", "-1"], "epochs must be at least 1"),
    "epochs that are no number": (["train", "--epochs", "many"], "many"),
    "steps": (["train", "--max-steps", "0"], "max steps must be at least 1"),
    "precision": (["train", "--precision", "bf32"], "Did you mean 'bf16'|Did you mean 'fp32'"),
    "on-nan": (["train", "--on-nan", "skp"], "Did you mean 'skip'"),
    "warm-up": (["train", "--warmup", "gradul"], "Did you mean 'gradual'"),
    "warm-up from nowhere": (["train", "--warmup", "gradual"], "where to start"),
    "decay": (["train", "--decay", "cosin"], "Did you mean 'cosine'"),
    "decay epochs": (["train", "--decay", "step", "--decay-epochs", "30;60"], "30;60"),
    "decay epochs in disorder": (["train", "--decay", "step", "--decay-epochs", "60,30"], "increase"),
    "device": (["train", "--device", "gpu"], "gpu.*--device cpu"),
    "device that cannot compute": (["train", "--device", "meta"], "meta"),
    "clip norm": (["train", "--clip-norm", "-1"], "clip norm must be above 0"),
    "save every": (["train", "--save-every", "0"], "save every must be at least 1"),
    "log every": (["train", "--log-every", "0"], "log every must be at least 1"),
    "seed too large": (["train", "logistic", "--seed", str(10**30)], "seed"),
    "resuming nothing": (["train", "--resume", "nowhere"], "nowhere/config.json"),
    "run without its directory": (["train", "--run", "--workers", "2"], "'--run': wanted a path, found '--workers'"),
    "resume without its directory": (["train", "--resume", "--epochs", "2"], "found '--epochs'.*write ./--epochs"),
    "data without its directory": (["train", "mnist", "--data", "-x"], "'--data': wanted a path, found '-x'"),
    "study without its directory": (["study", "optimizers", "--out", "--seed"], "'--out': wanted a path"),
    "delay": (["train", "--workers", "2", "--delay", "1+exq(0.5)"], "Did you mean 'exp'"),
    "delay of a worker that is not there": (["train", "--workers", "2", "--delay", "1 slow(2, 5)"], "worker 2"),
    "delay that kills": (["train", "--workers", "2", "--delay", "1 fails(0, 5)"], "fails.*kill"),
    "delay's unit": (["train", "--delay", "1", "--delay-unit", "40"], "40 has no unit"),
    "unit without a delay": (["train", "--delay-unit", "40ms"], '--delay "1.exp.0.5." --delay-unit 40ms'),
    "attack": (["train", "--attack", "sine-flip", "--hostile", "1"], "no attack called 'sine-flip'. Did you mean"),
    "attack of nobody": (["train", "--attack", "sign-flip"], "at least 1 hostile worker, got 0; for example --hostile"),
    "hostile for nothing": (["train", "--hostile", "1"], "1 hostile workers want an attack; for example --attack"),
    "more hostile workers than workers": (
        ["train", "--workers", "2", "--attack", "sign-flip", "--hostile", "3"],
        "wanted 3 hostile workers, found 2 workers",
    ),
    "hostile virtual workers": (
        ["simulate", "--problem", "digits", "--workers", "2,8", "--attack", "sign-flip", "--hostile", "3"],
        "wanted 3 hostile workers, found 2",
    ),
    "attack without a problem": (["simulate", "--attack", "sign-flip"], "--attack is for runs with a problem"),
    "normalised text": (["train", "logistic", "--normalise"], "no images to normalise"),
    "servers for a small model": (
        ["train", "quadratic", "--workers", "2", "--policy", "async", "--servers", "9"],
        "1 trained tensors cannot be dealt out to 9 servers",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("as_json", [False, True])
def test_a_mistake_is_one_line_and_exit_2(mistake: str, as_json: bool, paceline: Any, tmp_path: Path) -> None:
    arguments, message = MISTAKES[mistake]
    found = paceline(*arguments, *(["--json"] if as_json else []))
    assert found.code == 2
    assert found.out == ""
    assert found.err.startswith("paceline: ")
    assert found.err.count("\n") == 1, found.err
    assert re.search(message, found.err), found.err
    assert list(tmp_path.iterdir()) == [], "a mistake leaves nothing behind"


def test_running_nothing_is_answered_with_an_example(paceline: Any) -> None:
    found = paceline("run", "--workers", "2")
    assert (found.code, found.out, found.err.count("\n")) == (2, "", 1)
    assert "paceline run --workers 2 script.py" in found.err


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "{}", '{"train": 3}', '{"train": {}}', '{"train": {"x": 1}}'])
def test_a_run_of_something_else_is_not_resumed(content: str, paceline: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    found = paceline("train", "--resume", ".")
    assert (found.code, found.out) == (2, "")
    assert found.err.count("\n") == 1
    assert "config.json" in found.err


def test_an_old_run_is_not_written_over(paceline: Any) -> None:
    assert paceline(*QUICK, "--run", "mine", "--json").code == 0
    found = paceline(*QUICK, "--run", "mine", "--json")
    assert found.code == 2
    assert "mine already holds a run" in found.err


def test_a_run_in_use_is_refused(paceline: Any, tmp_path: Path) -> None:
    run = Run(tmp_path / "mine")
    found = paceline(*QUICK, "--run", "mine", "--json")
    run.close()
    assert found.code == 1
    assert "mine is in use by process" in found.err
    assert found.err.count("\n") == 1


@pytest.mark.parametrize("name", ["flush", "sync"])
def test_a_full_disk_is_told_in_one_line(name: str, paceline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it is the metrics that do not fit any more."""

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(MetricsWriter, name, full)
    found = paceline(*QUICK, "--json", "--run", "mine")
    assert (found.code, found.err.count("\n")) == (1, 1)
    assert re.search("full|No space left", found.err)


@pytest.mark.parametrize("place", ["runs", "mine"])
def test_a_file_in_place_of_the_run_directory(place: str, paceline: Any, tmp_path: Path) -> None:
    (tmp_path / place).touch()
    found = paceline(*QUICK, *(["--run", "mine"] if place == "mine" else []))
    assert (found.code, found.err.count("\n")) == (2, 1), found.err
    assert place in found.err


def test_a_loss_that_is_not_finite_stops_with_step_and_checkpoint(paceline: Any) -> None:
    found = paceline(*QUICK, "--optimizer", "sgd(lr=1e30)", "--json", "--run", "mine", "--save-every", "1")
    assert found.code == 1
    assert found.out == ""
    assert found.err.count("\n") == 1
    assert "worker 0, step " in found.err
    assert "checkpoint" in found.err
    assert "--on-nan skip" in found.err


@pytest.mark.parametrize("on_nan", ["skip", "ignore"])
def test_a_loss_that_is_not_finite_may_be_let_through(on_nan: str, paceline: Any) -> None:
    found = paceline(*QUICK, "--optimizer", "sgd(lr=1e30)", "--json", "--on-nan", on_nan)
    assert found.code == 0

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    assert json.loads(found.out, parse_constant=refuse)["steps"] == 16


def test_one_object_for_machines(paceline: Any, tmp_path: Path) -> None:
    found = paceline(*QUICK, "--json")
    assert (found.code, found.err) == (0, "")
    assert found.out.count("\n") == 1
    result = json.loads(found.out)
    assert (result["problem"], result["steps"], result["epochs"]) == ("quadratic", 16, 2)
    assert result["run"] == "runs/quadratic-1"
    assert (tmp_path / result["run"] / "config.json").exists()


def test_for_people_the_result_and_where_it_lies(paceline: Any) -> None:
    found = paceline(*QUICK)
    assert found.code == 0
    assert "quadratic: excess" in found.out
    assert found.out.endswith("run: runs/quadratic-1\n")


def test_default_directories_count_up(paceline: Any, tmp_path: Path) -> None:
    (tmp_path / "runs" / "quadratic-2").mkdir(parents=True)
    runs = [json.loads(paceline(*QUICK, "--json").out)["run"] for _ in range(2)]
    assert runs == ["runs/quadratic-1", "runs/quadratic-3"]


def final(run: Path) -> Any:
    """What a run ended with, but for the bytes of its metrics, which hold times."""
    (*_, last) = CheckpointFolder(run / "checkpoints").files()
    state = read_checkpoint(last)
    del state["session"]["metrics_bytes"]
    return state, metrics_of(run)


def test_the_same_seed_gives_the_same_bits_and_another_does_not(paceline: Any, tmp_path: Path) -> None:
    digits = ("train", "digits", "--epochs", "1", "--json")
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert paceline(*digits, "--run", name, "--seed", seed).code == 0
    assert_same(final(tmp_path / "a"), final(tmp_path / "b"))
    assert metrics_of(tmp_path / "a") != metrics_of(tmp_path / "c")


def test_bf16_trains_and_is_not_fp32(paceline: Any, tmp_path: Path) -> None:
    """Close to fp32 and not equal to it; logistic regression, for bf16 is slow on most processors."""
    quick = ("train", "logistic", "--batch-size", "512", "--epochs", "3", "--optimizer", "adam(lr=0.03)", "--json")
    values = {
        precision: json.loads(paceline(*quick, "--precision", precision, "--run", precision).out)["value"]
        for precision in ("fp32", "bf16")
    }
    assert values["bf16"] > 0.8
    assert abs(values["bf16"] - values["fp32"]) < 0.05
    assert metrics_of(tmp_path / "bf16") != metrics_of(tmp_path / "fp32")


@pytest.mark.parametrize(
    "options",
    [
        ["--optimizer", "adam(lr=0.01)", "--clip-norm", "0.5", "--precision", "bf16"],
        ["--warmup", "gradual", "--warmup-start", "0.1", "--warmup-epochs", "1", "--decay", "cosine"],
        ["--decay", "step", "--decay-epochs", "0.5,1.5", "--base-batch", "256"],
        ["--optimizer", "lbfgs(max_iter=2)"],
        ["--attack", "gaussian(deviation=3)", "--hostile", "1"],
    ],
)
def test_resuming_takes_the_options_of_the_run(options: list[str], paceline: Any, tmp_path: Path) -> None:
    """Stopped by --max-steps in mid-epoch, then told only to go on further."""
    options = ["--seed", "5", "--save-every", "3", *options]
    assert paceline(*QUICK, *options, "--run", "whole", "--json").code == 0
    assert paceline(*QUICK, *options, "--run", "part", "--json", "--max-steps", "5").code == 0
    found = paceline("train", "--resume", "part", "--max-steps", "1000", "--json")
    assert json.loads(found.out)["steps"] == 16
    lines = [line for line in metrics_of(tmp_path / "part") if '"step": 5' not in line or "evaluation" not in line]
    assert lines == metrics_of(tmp_path / "whole")
    assert_same(final(tmp_path / "part")[0], final(tmp_path / "whole")[0])


def test_resuming_a_finished_run_says_the_same_again(paceline: Any, tmp_path: Path) -> None:
    first = json.loads(paceline(*QUICK, "--run", "mine", "--json").out)
    before = final(tmp_path / "mine")
    again = json.loads(paceline("train", "--resume", "mine", "--json").out)
    assert (first["resumed_at"], again["resumed_at"]) == (0, 16)
    assert {**again, "seconds": 0, "resumed_at": 0} == {**first, "seconds": 0}
    assert_same(final(tmp_path / "mine"), before)


def test_resuming_a_finished_run_says_that_it_was_finished(paceline: Any) -> None:
    """And not how fast nothing was done."""
    first = paceline(*QUICK, "--run", "mine").out.splitlines()[0]
    again = paceline("train", "--resume", "mine").out.splitlines()[0]
    assert first.startswith(again.removesuffix("; the run was finished already") + " in ")
    assert again != first and "finished already" not in first
    longer = paceline("train", "--resume", "mine", "--epochs", "3").out.splitlines()[0]
    assert "after 24 steps in " in longer


def test_resuming_takes_the_workers_of_the_run(paceline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    servers: list[ServerOptions] = []

    def supervise(*_: Any, workers: int, server: ServerOptions, **__: Any) -> int:
        asked.append(workers)
        servers.append(server)
        return 1

    monkeypatch.setattr("paceline.launch.supervisor.supervise", supervise)
    paceline(*QUICK, "--run", "mine", "--json")
    config = json.loads((tmp_path / "mine" / "config.json").read_text())
    (tmp_path / "mine" / "config.json").write_text(json.dumps({**config, "world_size": 3}))
    paceline("train", "--resume", "mine")
    paceline("train", "--resume", "mine", "--workers", "2")
    assert asked == [3, 2] and servers[0].delay is None
    assert paceline("train", "--resume", "mine", "--workers", "1").code == 0
    slow = {"world_size": 3, "delay": "1 slow(worker=2, factor=3)", "delay_unit": "8ms", "servers": 1}
    (tmp_path / "mine" / "config.json").write_text(json.dumps({**config, **slow}))
    paceline("train", "--resume", "mine")
    paceline("train", "--resume", "mine", "--delay", "2")
    assert [each.delay for each in servers[-2:]] == [(slow["delay"], 0.008), ("2", 0.008)]
    (tmp_path / "mine" / "config.json").write_text(json.dumps({**config, **slow, "servers": 2}))
    assert "2 servers" in paceline("train", "--resume", "mine").err  # the model has fewer tensors


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["train", "--help"], ["bench"], ["study"]])
def test_help_is_printed_as_it_was_laid_out(arguments: list[str], paceline: Any) -> None:
    """One line for each option, and not all in one paragraph."""
    found = paceline(*arguments)
    assert (found.code, found.err) == (0, "")
    usage, _, options = found.out.partition("\nOptions:\n")
    words = [word for word in arguments if not word.startswith("-")]
    assert " ".join([*words, "[OPTIONS]"]) in usage.splitlines()[0]
    assert any(line.startswith("  -h, --help  ") for line in options.splitlines())


def test_the_version_is_told(paceline: Any) -> None:
    found = paceline("--version")
    assert (found.code, found.out) == (0, f"paceline, version {__version__}\n")


WITHOUT_TORCH = """
import sys
from paceline.commands.cli import main
try:
    main(["--help"])
finally:
    assert "torch" not in sys.modules, "torch was imported"
"""


@pytest.mark.processes
def test_help_does_not_wait_for_torch() -> None:
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=200, env=ENVIRONMENT
    )
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.processes
def test_python_m_is_the_command() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "paceline", "--help"], capture_output=True, text=True, timeout=200, env=ENVIRONMENT
    )
    assert found.returncode == 0
    assert "Usage: " in found.stdout
    assert "train" in found.stdout
