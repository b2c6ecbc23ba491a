"""The benchmarks run, and their JSON has the shape that reports are made from; nothing is timed here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.measuring import print_table

pytestmark = pytest.mark.processes

REPOSITORY = Path(__file__).resolve().parent.parent
PARTS = ("forward", "backward", "communication", "waited", "optimizer")


def run(script: str, *arguments: str, code: int | None = 0) -> Any:
    """Run a script of ``benchmarks/`` for a few seconds and give its JSON, the only thing that it may print."""
    return run_command(str(REPOSITORY / "benchmarks" / script), *arguments, code=code)


def run_command(*arguments: str, code: int | None = 0) -> Any:
    process = subprocess.Popen(
        [sys.executable, *arguments, "--quick", "--json"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, errors = process.communicate()
    finally:
        process.terminate()  # not killed: it has workers and network namespaces to end
        process.wait()
    assert code is None or process.returncode == code, errors
    return json.loads(out)


def positive(row: dict[str, Any], *keys: str) -> bool:
    return all(row[key] > 0 for key in keys)


def test_equality() -> None:
    found = run("equality.py")
    assert found["equal"] is True
    assert {row["reference"] for row in found["rows"]} == {"one worker", "torch ddp"}
    for row in found["rows"]:
        assert 0 <= row["difference"] <= row["allowed"] < row["moved"]
        assert row["ranks_agree"] is True and row["workers"] == 2


def test_equality_fails_where_the_bound_is_broken() -> None:
    found = run("equality.py", "--bound", "0", code=1)
    assert found["equal"] is False
    assert any(row["difference"] > row["allowed"] for row in found["rows"])


def test_bench_step() -> None:
    rows = run_command("-m", "paceline", "bench", "step")["rows"]
    ways = {row["way"]: row for row in rows}
    exchanges = {"session", "our ddp", "torch ddp"}
    assert set(ways) == {"barrier", *exchanges, *(f"{way} on gloo" for way in exchanges)}
    assert all(positive(row, "megabytes", "step_ms", "over_barrier", "over_gloo") for row in rows)
    assert ways["barrier"]["over_barrier"] == ways["torch ddp on gloo"]["over_gloo"] == 1


def test_bench_collectives() -> None:
    rows = run_command("-m", "paceline", "bench", "collectives", "--ranks", "2")["rows"]
    assert [(row["bytes"], row["buffers"]) for row in rows] == [(n, b) for n in (4096, 65536) for b in ("hot", "cold")]
    for row in rows:
        assert row["ranks"] == 2
        assert positive(row, "ours_us", "any_us", "gloo_us", "ours_ratio", "any_ratio", "bandwidth_share")


def test_bench_server() -> None:
    found = run_command("-m", "paceline", "bench", "server")
    rows = found["rows"]
    assert found["rate"]["workers"] == 3 and positive(found["rate"], "pushes_per_second")
    assert [row["way"] for row in rows] == ["shared memory", "rpc", "tcp, trusted", "tcp, sealed", "rpc"]
    assert all(row["bytes"] == 4096 and positive(row, "trip_us", "per_second", "rpc_ratio") for row in rows)


def test_live_server() -> None:
    (row,) = run("live_server.py")["rows"]
    assert (row["policy"], row["k"], row["staleness"], row["stale_off"]) == ("k-sync", 2, 0, None)
    assert positive(row, "commits", "expected", "virtual", "interval")


def test_live_kills() -> None:
    found = run("live_kills.py", code=None)
    assert found["code"] == 0 and found["kills"] == 2
    assert found["exactly_once"] is True and found["least"] == found["most"] == found["epochs"]


def check_sweep(found: dict[str, Any]) -> None:
    cases = [(row["cap_mb"], row["overlap"]) for row in found["rows"]]
    assert cases == [(0, True), (0, False), (25, True), (25, False)]
    for row in found["rows"]:
        assert positive(row, "step_ms", "over_no_overlap", "link_mb_per_s", "megabytes")
        assert all(row[f"{part}_ms"] >= 0 for part in PARTS)


def test_bucket_sweep() -> None:
    found = run("bucket_sweep.py")
    assert found["hosts"] == 1
    check_sweep(found)


def test_bucket_sweep_on_two_hosts() -> None:
    found = run("bucket_sweep.py", "--two-hosts")
    if "skipped" in found:
        pytest.skip(found["skipped"])
    assert found["hosts"] == 2 and found["rate"] == "1gbit"
    check_sweep(found)


def test_scaling() -> None:
    found = run("scaling.py")
    assert [(row["scaling"], row["workers"]) for row in found["rows"]] == [
        ("weak", 1),
        ("weak", 2),
        ("strong", 1),
        ("strong", 2),
    ]
    for row in found["rows"]:
        assert positive(row, "step_ms", "examples_per_s", "speed", "efficiency")
        assert row["shared_cores"] is (row["workers"] > found["cores"])
        if row["workers"] == 1:
            assert row["speed"] == row["efficiency"] == 1


def test_oracle() -> None:
    found = run("oracle.py", "--delays", "exp(1)")
    assert {row["policy"] for row in found["rows"]} == {"k-sync", "k-batch-sync", "k-async", "k-batch-async"}
    for row in found["rows"]:
        assert positive(row, "expected", "found") and row["off"] < 40 and row["allowed"] in (1, 2)


def test_virtual_speed() -> None:
    found = run("virtual_speed.py")
    assert [row["policy"] for row in found["rows"]] == ["k-sync(k=500)", "k-async(k=10)"]
    for row in found["rows"]:
        assert positive(row, "seconds", "allowed", "megabytes")
        assert row["pushes"] == row["commits"] * int(row["policy"].strip(")").split("=")[1])


def test_ada_sync() -> None:
    found = run("ada_sync.py")
    assert len(found["curves"]) == 5 and len(found["rows"]) == 12
    losses = [row["loss"] for row in found["rows"]]
    assert losses == sorted(losses, reverse=True)
    assert found["worst"] == max(row["ratio"] for row in found["rows"])
    assert all(row["ratio"] == row["ada"] / row["best"] for row in found["rows"])


def test_replay() -> None:
    found = run("replay.py")
    (row,) = found["rows"]
    assert row["policy"] == "sync" and row["equal"] is True
    assert positive(row, "pushes", "hashes", "replay_seconds", "computing_seconds")
    assert [row["runs"] for row in found["table"]] == [row["equal"] for row in found["table"]] == [1, 1]
    assert found["table"][-1]["bytes_per_event"] < 64
    assert positive(found["recording"], "pushes_per_second", "recorded_per_second")


def test_server_kills() -> None:
    found = run("server_kills.py")
    assert found["server_kills"] == found["worker_kills"] == found["servers_found"] == 1
    assert found["equal"] is True and found["exactly_once"] is True and found["versions_lost"] == 0
    assert positive(found, "commits", "pushes", "hashes")


def test_double_buffer() -> None:
    rows = run("double_buffer.py")
    assert [row["optimizer"] for row in rows] == ["sgd", "sgd, momentum", "adam"]
    assert all(positive(row, "bytes", "update_us", "noting_us", "copying_us") for row in rows)


def test_a_value_that_was_not_measured_is_a_dash_in_tables(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([{"bytes": 4, "mpi_us": 1.25}, {"bytes": 8, "mpi_us": None}], {"bytes": "d", "mpi_us": ".1f"})
    assert [line.split() for line in capsys.readouterr().out.splitlines()][1:] == [["4", "1.2"], ["8", "-"]]
