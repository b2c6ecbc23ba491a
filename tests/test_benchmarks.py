"""The benchmarks run, and their JSON has the shape that reports are made from; nothing is timed here."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.codecs import CODECS, parse_codec
from paceline.commands.cli import main
from paceline.report.table import print_table

pytestmark = pytest.mark.processes

REPOSITORY = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(path.name for path in (REPOSITORY / "benchmarks").glob("*.py") if "__main__" in path.read_text())
PARTS = ("forward", "backward", "communication", "waited", "optimizer")


class Scripts:
    """Runs scripts of ``benchmarks/`` and ``paceline bench`` for a few seconds each.

    Their first process is this one, which has imported torch already; their workers are processes of their own.
    """

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch

    def __call__(self, script: str, *arguments: str, code: int | None = 0) -> Any:
        """Run a script and give its JSON, the only thing that it may print."""
        path = str(REPOSITORY / "benchmarks" / script)
        self._monkeypatch.setattr(sys, "argv", [path, *arguments, "--quick", "--json"])
        return self._json(lambda: runpy.run_path(path, run_name="__main__"), code)

    def bench(self, *arguments: str) -> Any:
        """Run ``paceline bench``, as ``__call__`` does a script."""
        return self._json(lambda: main(["bench", *arguments, "--quick", "--json"]), 0)

    def _json(self, start: Callable[[], object], code: int | None) -> Any:
        ended: object = 0
        try:
            start()
        except SystemExit as exit:
            ended = exit.code
        out, errors = self._capsys.readouterr()
        assert code is None or ended == code, errors
        return json.loads(out)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Scripts:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")  # some take from others
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    return Scripts(capsys, monkeypatch)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_says_how_it_is_called(
    script: str, run: Scripts, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(REPOSITORY / "benchmarks" / script), run_name="__main__")
    assert ended.value.code == 0 and script in capsys.readouterr().out


def positive(row: dict[str, Any], *keys: str) -> bool:
    return all(row[key] > 0 for key in keys)


@pytest.mark.soak
def test_equality(run: Scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run fails, with a bound that rounding breaks; its rows are good enough for a bound that is not."""
    found = run("equality.py", "--bound", "0", code=1)
    rows = found["rows"]
    assert found["equal"] is False
    assert any(row["difference"] > row["allowed"] for row in rows)
    assert {row["reference"]: row["allowed"] for row in rows}["one worker"] == 0
    rows = [{**row, "allowed": max(1e-5, row["allowed"])} for row in rows]
    monkeypatch.setattr("paceline.bench.measuring.run_workers", lambda _: rows)
    found = run("equality.py", "--workers", "2")
    assert found["equal"] is True and found["bound"] == 1e-5
    assert {row["reference"] for row in found["rows"]} == {"one worker", "torch ddp"}
    for row in found["rows"]:
        assert 0 <= row["difference"] <= row["allowed"] < row["moved"]
        assert row["ranks_agree"] is True and row["workers"] == 2


@pytest.mark.soak
def test_bench_step(run: Scripts) -> None:
    rows = run.bench("step")["rows"]
    ways = {row["way"]: row for row in rows}
    exchanges = {"session", "our ddp", "torch ddp"}
    assert set(ways) == {"barrier", *exchanges, *(f"{way} on gloo" for way in exchanges)}
    assert all(positive(row, "megabytes", "step_ms", "over_barrier", "over_gloo") for row in rows)
    assert ways["barrier"]["over_barrier"] == ways["torch ddp on gloo"]["over_gloo"] == 1


@pytest.mark.soak
def test_bench_codecs(run: Scripts) -> None:
    found = run.bench("codecs")
    rows = {row["way"]: row for row in found["rows"]}
    assert {parse_codec(way).name for way in rows if not way.startswith("torch ")} == set(CODECS)
    assert {way for way in rows if way.startswith("torch ")} == {"torch fp16_compress_hook", "torch powerSGD_hook"}
    for way, row in rows.items():
        assert positive(row, "megabytes", "reduce_ms") and row["model"] == "net3"
        if not way.startswith("torch "):
            assert positive(row, "bytes", "ratio", "encode_gb_s", "decode_gb_s")
    assert [row["way"] for row in found["steps"]] == ["none", *(way for way in rows if not way.startswith("torch "))]
    for row in found["steps"]:
        assert positive(row, "step_ms", "bytes") and positive(row["links"], "10Gbit/s")
        assert (row["pays_below"] is None) == (row["way"] == "none")


@pytest.mark.soak
def test_bench_collectives(run: Scripts) -> None:
    found = run.bench("collectives", "--ranks", "2", "--busy", "1")
    rows = found["rows"]
    assert found["busy"] == 1
    assert [(row["bytes"], row["buffers"]) for row in rows] == [(n, b) for n in (4096, 65536) for b in ("hot", "cold")]
    for row in rows:
        assert row["ranks"] == 2
        assert positive(row, "ours_us", "any_us", "gloo_us", "ours_ratio", "any_ratio", "bandwidth_share")


@pytest.mark.soak
@pytest.mark.skipif(not (REPOSITORY / ".git").exists(), reason="no commits to build")
def test_before_after(run: Scripts) -> None:
    rows = run("before_after.py", "HEAD", "--bench", "collectives")["rows"]
    ways = [f"{buffers}, {way}" for buffers in ("hot", "cold") for way in ("ours", "any", "gloo")]
    assert [row["row"] for row in rows] == [f"4 KB, {way}" for way in ways]
    for row in rows:
        assert positive(row, "old_us", "new_us") and row["ratio"] == row["lowest"] == row["highest"]


@pytest.mark.soak
def test_bench_server(run: Scripts) -> None:
    found = run.bench("server")
    rows = found["rows"]
    assert found["rate"]["workers"] == 2 and positive(found["rate"], "pushes_per_second")
    assert [row["way"] for row in rows] == ["shared memory", "rpc", "tcp, trusted", "tcp, sealed", "rpc"]
    assert all(row["bytes"] == 4096 and positive(row, "trip_us", "per_second", "rpc_ratio") for row in rows)


@pytest.mark.soak
def test_live_server(run: Scripts) -> None:
    (row,) = run("live_server.py")["rows"]
    assert (row["policy"], row["k"], row["staleness"], row["stale_off"]) == ("k-sync", 2, 0, None)
    assert positive(row, "commits", "expected", "virtual", "interval")


@pytest.mark.soak
def test_live_kills(run: Scripts) -> None:
    found = run("live_kills.py", code=None)
    assert found["code"] == 0 and found["kills"] == 2
    assert found["exactly_once"] is True and found["least"] == found["most"] == found["epochs"]


def check_sweep(found: dict[str, Any]) -> None:
    cases = [(row["cap_mb"], row["overlap"]) for row in found["rows"]]
    assert cases == [(0, True), (0, False), (25, True), (25, False)]
    for row in found["rows"]:
        assert positive(row, "step_ms", "over_no_overlap", "link_mb_per_s", "megabytes")
        assert all(row[f"{part}_ms"] >= 0 for part in PARTS)


@pytest.mark.soak
def test_bucket_sweep(run: Scripts) -> None:
    found = run("bucket_sweep.py")
    assert found["hosts"] == 1
    check_sweep(found)


@pytest.mark.soak
def test_bucket_sweep_on_two_hosts(run: Scripts) -> None:
    found = run("bucket_sweep.py", "--two-hosts")
    if "skipped" in found:
        pytest.skip(found["skipped"])
    assert found["hosts"] == 2 and found["rate"] == "1gbit"
    check_sweep(found)


@pytest.mark.soak
@pytest.mark.data
def test_slow_link(run: Scripts, data_dir: Path) -> None:
    found = run("slow_link.py", "--data", str(data_dir / "mnist"))
    if "skipped" in found:
        pytest.skip(found["skipped"])
    assert [row["policy"] for row in found["rows"]] == ["all-reduce", "local-sgd(every=16)"]
    for row in found["rows"]:
        assert positive(row, "examples_per_s", "throughput_ratio", "steps", "seconds_to_target", "speedup")


@pytest.mark.soak
def test_peer_kills(run: Scripts) -> None:
    (row,) = run("peer_kills.py", code=None)["rows"]
    assert (row["policy"], row["kills"], row["exactly_once"]) == ("all-reduce", 1, True)
    assert row["starts"] <= 2 + row["kills"] and positive(row, "seconds", "epochs", "steps", "accuracy")


@pytest.mark.soak
def test_scaling(run: Scripts) -> None:
    found = run("scaling.py")
    assert [(row["scaling"], row["workers"]) for row in found["rows"]] == [
        ("weak", 1),
        ("weak", 2),
        ("strong", 1),
        ("strong", 2),
    ]
    for row in found["rows"]:
        assert positive(row, "step_ms", "examples_per_s", "scaling_efficiency")
        gained = row["scaling_efficiency"] * (row["workers"] if row["scaling"] == "weak" else 1)
        assert row["speedup"] == gained and row["parallel_efficiency"] == gained / row["workers"]
        assert row["shared_cores"] is (row["workers"] > found["cores"])
        if row["workers"] == 1:
            assert row["scaling_efficiency"] == 1


def test_oracle(run: Scripts) -> None:
    found = run("oracle.py", "--delays", "exp(1)")
    assert {row["policy"] for row in found["rows"]} == {"k-sync", "k-batch-sync", "k-async", "k-batch-async"}
    for row in found["rows"]:
        assert positive(row, "expected", "found") and row["off"] < 40 and row["allowed"] in (1, 2)


def test_virtual_speed(run: Scripts) -> None:
    found = run("virtual_speed.py")
    assert [row["policy"] for row in found["rows"]] == ["k-sync(k=500)", "k-async(k=10)"]
    for row in found["rows"]:
        assert positive(row, "seconds", "allowed", "megabytes")
        assert row["pushes"] == row["commits"] * int(row["policy"].strip(")").split("=")[1])


def test_ada_sync(run: Scripts) -> None:
    found = run("ada_sync.py")
    assert len(found["curves"]) == 5 and len(found["rows"]) == 12
    losses = [row["loss"] for row in found["rows"]]
    assert losses == sorted(losses, reverse=True)
    assert found["worst"] == max(row["ratio"] for row in found["rows"])
    assert all(row["ratio"] == row["ada"] / row["best"] for row in found["rows"])


@pytest.mark.soak
def test_replay(run: Scripts) -> None:
    found = run("replay.py")
    (row,) = found["rows"]
    assert row["policy"] == "sync" and row["equal"] is True
    assert positive(row, "pushes", "hashes", "replay_seconds", "computing_seconds")
    assert [row["runs"] for row in found["table"]] == [row["equal"] for row in found["table"]] == [1, 1]
    assert found["table"][-1]["bytes_per_event"] < 64
    assert positive(found["recording"], "pushes_per_second", "recorded_per_second")


@pytest.mark.soak
def test_server_kills(run: Scripts) -> None:
    found = run("server_kills.py")
    assert found["server_kills"] == found["worker_kills"] == found["servers_found"] == 1
    assert found["equal"] is True and found["exactly_once"] is True and found["versions_lost"] == 0
    assert positive(found, "commits", "pushes", "hashes")


def test_double_buffer(run: Scripts) -> None:
    rows = run("double_buffer.py")
    assert [row["optimizer"] for row in rows] == ["sgd", "sgd, momentum", "adam"]
    assert all(positive(row, "bytes", "update_us", "noting_us", "copying_us") for row in rows)


def test_a_value_that_was_not_measured_is_a_dash_in_tables(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([{"bytes": 4, "mpi_us": 1.25}, {"bytes": 8, "mpi_us": None}], {"bytes": "d", "mpi_us": ".1f"})
    assert [line.split() for line in capsys.readouterr().out.splitlines()][1:] == [["4", "1.2"], ["8", "-"]]


@pytest.mark.soak
def test_threads(run: Scripts) -> None:
    found = run("threads.py")
    ways = [(row["threads"], row["beside"]) for row in found["rows"]]
    assert ways == [(1, 0), (found["cores"], 0), (1, found["cores"]), (found["cores"], found["cores"])]
    assert all(positive(row, "mflop", "step_ms", "over_one", "over_idle") for row in found["rows"])


@pytest.mark.soak
def test_threads_of_a_script(run: Scripts) -> None:
    found = run("threads.py", "--script")
    ways = [(row["threads"], row["beside"]) for row in found["rows"]]
    assert ways == [(0, 0), (0, found["cores"]), (found["cores"], 0), (found["cores"], found["cores"])]
    assert all(positive(row, "mflop", "step_ms", "over_one", "over_idle") for row in found["rows"])


@pytest.mark.soak
def test_sparse_speed(run: Scripts) -> None:
    pytest.importorskip("paceline.native._sparse")
    found = run("sparse_speed.py", "--only", "threads", "delay", "completion")
    assert {row["policy"] for row in found["threads"]} >= {"serial", "hogwild(threads=2)", "together"}
    assert all(row["error / serial's"] == 1 for row in found["delay"] if row["policy"].startswith("cyclades"))
    assert all(row["updates per second"] > 0 for part in found.values() for row in part)


def test_readers_of_sparse_text_are_compared(run: Scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("_readers", "_sparse"):
        pytest.importorskip(f"paceline.native.{module}", exc_type=ImportError)
    monkeypatch.chdir(tmp_path)
    result = run("sparse_readers.py")
    assert {"all cores", "one core", "through a new cache", "from the cache"} <= {row["way"] for row in result["rows"]}
    assert result["limited"]["csr_mb"] > 0
    assert list(tmp_path.iterdir()) == []
