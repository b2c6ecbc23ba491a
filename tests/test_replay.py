"""Replays: every recorded run is made again to the last bit, and what is not the same is named."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import HASH_EVERY, record, rewrite

from paceline.policies import POLICIES, ServerPolicy
from paceline.record.trace import Cancelled, Committed, Described, Given, Hashed, Pushed, Record, Trace
from paceline.schedules import ScheduleConfig

# One under every server policy; options that change the numbers are dealt out among them.
RUNS: dict[str, dict[str, Any]] = {
    "sync": {"optimizer": "adam(lr=0.003)"},
    "k-sync(k=2)": {"clip_norm": 0.5},
    "k-batch-sync(k=4)": {"optimizer": "sgd(lr=0.05, momentum=0.9)"},
    "async": {"optimizer": "sgd(lr=0.02)"},
    "k-async(k=2)": {"optimizer": "adam(lr=0.003)"},
    "k-batch-async(k=3)": {"precision": "bf16"},
    "ssp(bound=2, weights=staleness)": {"optimizer": "lamb(lr=0.01)"},
    "ada-sync(k0=1)": {},
    "downpour(period=3)": {
        "optimizer": "sgd(lr=0.05, momentum=0.9)",
        "clip_norm": 0.5,
        "schedule": ScheduleConfig(decay="cosine"),
    },
    "draco(faulty=1)": {"optimizer": "sgd(lr=0.05, momentum=0.9)"},
    "gradient-coding(stragglers=1)": {"optimizer": "adam(lr=0.003)", "clip_norm": 0.5},
    "easgd(period=3, alpha=0.3)": {"optimizer": "adam(lr=0.003)", "schedule": ScheduleConfig(decay="cosine")},
    "easgd(period=1, alpha=0.3, order=round-robin, momentum=0.9)": {"optimizer": "sgd(lr=0.02)", "clip_norm": 0.5},
    "k-batch-async(k=3, aggregator=median)": {"clip_norm": 0.5},
    "async(aggregator=delay-compensated(scale=2.0, momentum=0.95))": {"optimizer": "sgd(lr=0.02)"},
}


def records(run: Path) -> list[Record]:
    return list(Trace(run / "trace.bin"))


def of_kind(run: Path, kind: type[Any]) -> list[Any]:
    return [one for one in records(run) if isinstance(one, kind)]


def test_all_server_policies_are_here() -> None:
    servers = {name for name, kind in POLICIES.items() if issubclass(kind, ServerPolicy)}
    assert {policy.partition("(")[0] for policy in RUNS} == servers


CODED = [
    ("k-sync(k=2)", "top-k(density=0.1)"),
    ("k-batch-sync(k=4)", "sign(both=true)"),
    ("k-batch-async(k=3)", "qsgd(raw_below=0, both=true)"),
    ("downpour(period=3)", "threshold(tau=0.001, both=true)"),
]


@pytest.mark.parametrize(("policy", "codec"), CODED)
def test_a_run_with_a_codec_is_equal_to_the_last_bit(policy: str, codec: str, tmp_path: Path, paceline: Any) -> None:
    run = record(tmp_path, policy, codec=codec, optimizer="sgd(lr=0.02)")
    found = json.loads(paceline("replay", str(run), "--json").out)
    assert found["equal"] is True and found["pushes"] > 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", RUNS)
def test_a_run_is_equal_to_the_last_bit(policy: str, tmp_path: Path, paceline: Any) -> None:
    run = record(tmp_path, policy, **RUNS[policy])
    ended = paceline("replay", str(run), "--json")
    assert (ended.code, ended.err) == (0, "")
    found = json.loads(ended.out)
    assert found["equal"] is True and found["warnings"] == []
    assert found["pushes"] == len(of_kind(run, Pushed)) > 0
    assert found["commits"] == found["version"] == len(of_kind(run, Committed)) > 0
    assert found["hashes"] == found["commits"] // HASH_EVERY + 1
    assert found["digest"] == of_kind(run, Hashed)[-1].digest.hex()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose workers are stale and go on with buffers of their own."""
    torch.set_num_threads(1)
    return record(tmp_path_factory.mktemp("recorded"), "k-batch-sync(k=5)")


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    return Path(shutil.copytree(recorded, tmp_path / "run"))


def test_the_run_has_what_makes_replays_hard(recorded: Path) -> None:
    assert any(not one.fresh for one in of_kind(recorded, Given))
    assert of_kind(recorded, Cancelled)


def test_the_outcome_is_one_line(run: Path, paceline: Any) -> None:
    ended = paceline("replay", str(run))
    commits, pushes, hashes = (len(of_kind(run, kind)) for kind in (Committed, Pushed, Hashed))
    assert ended.out == f"{commits} commits, {pushes} pushes and {hashes} hashes: equal to the last bit\n"
    assert (ended.code, ended.err) == (0, "")


def test_another_loss_is_named_with_its_worker_and_step(run: Path, paceline: Any) -> None:
    wanted = of_kind(run, Pushed)[20]
    wrong = wanted._replace(loss=wanted.loss * (1 + 2**-52))
    rewrite(run, lambda old: [wrong if one == wanted else one for one in old])
    ended = paceline("replay", str(run))
    assert (ended.code, ended.out) == (1, "")
    assert f"worker {wanted.rank}, step {wanted.step}, on version {wanted.version} (batch " in ended.err
    assert f"checksum {wanted.checksum:016x}, where the run had {wrong.loss!r} and {wanted.checksum:016x}" in ended.err
    assert ended.err.count("\n") == 1
    found = json.loads(paceline("replay", str(run), "--json").out)
    assert found["equal"] is False and found["difference"] in ended.err
    assert found["pushes"] >= 20 - 5 and found["commits"] == wanted.version


def test_another_checksum_is_named_with_its_worker_and_step(run: Path, paceline: Any) -> None:
    wanted = of_kind(run, Pushed)[-1]
    wrong = wanted._replace(checksum=wanted.checksum ^ 1)
    rewrite(run, lambda old: [wrong if one == wanted else one for one in old])
    ended = paceline("replay", str(run))
    assert ended.code == 1
    assert f"worker {wanted.rank}, step {wanted.step}, on version {wanted.version} (" in ended.err
    assert f"checksum {wanted.checksum:016x}, where the run had {wanted.loss!r} and {wrong.checksum:016x}" in ended.err


def test_another_hash_is_named_with_its_version(run: Path, paceline: Any) -> None:
    wanted = of_kind(run, Hashed)[1]
    wrong = wanted._replace(digest=bytes(16))
    rewrite(run, lambda old: [wrong if one == wanted else one for one in old])
    ended = paceline("replay", str(run))
    assert ended.code == 1
    assert f"version {2 * HASH_EVERY}: the parameters and buffers have the hash {wanted.digest.hex()}" in ended.err
    assert f"{'00' * 16}; all pushes before are equal" in ended.err


@pytest.mark.parametrize("option", [{"seed": 6}, {"optimizer": "sgd(lr=0.1)"}, {"clip_norm": 1.0}])
def test_another_configuration_differs(option: dict[str, Any], run: Path, paceline: Any) -> None:
    config = json.loads((run / "config.json").read_text())
    config["train"].update(option)
    (run / "config.json").write_text(json.dumps(config))
    ended = paceline("replay", str(run))
    assert ended.code == 1 and "bits differ: worker " in ended.err


def test_other_data_is_told(run: Path, paceline: Any) -> None:
    (first, *_) = of_kind(run, Described)
    wrong = first._replace(checksum=first.checksum ^ 1)
    rewrite(run, lambda old: [wrong if isinstance(one, Described) and one.checksum else one for one in old])
    ended = paceline("replay", str(run))
    assert ended.code == 1
    assert f"the data is not that of the run: its first batch had the checksum {wrong.checksum:08x}" in ended.err
    rewrite(run, lambda old: [one._replace(num_samples=601) if isinstance(one, Described) else one for one in old])
    ended = paceline("replay", str(run))
    assert ended.code == 1 and "it had 601 samples in batches of 16, but there are 600" in ended.err


def test_a_machine_that_is_another_is_warned_of(run: Path, paceline: Any) -> None:
    rewrite(run, lambda old: old, torch="1.0", processor="ABACUS", threads=1_000_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "set_num_threads", lambda _: None)
        ended = paceline("replay", str(run))
    assert ended.code == 0 and "equal to the last bit" in ended.out
    torch_line, processor_line, threads_line = ended.err.splitlines()
    assert (
        torch_line == f"paceline: warning: torch is {torch.__version__} here, but was 1.0 in the run; bits may differ"
    )
    assert "ABACUS" in processor_line and "1000000 threads a worker" in threads_line
    rewrite(run, lambda old: [one._replace(loss=1.0) if isinstance(one, Pushed) else one for one in old], threads=1)
    assert "note that torch is" in paceline("replay", str(run)).err.splitlines()[-1]


def test_a_run_resumed_with_other_options_is_warned_of(run: Path, paceline: Any) -> None:
    options = json.loads((run / "config.json").read_text())["train"]
    first = {**options, "clip_norm": 3.0, "epochs": 1, "run": "elsewhere"}
    rewrite(run, lambda old: old, command=["-m", "paceline", "train-worker", json.dumps(first)])
    ended = paceline("replay", str(run))
    assert ended.code == 0 and "other options (clip-norm); the replay uses the last" in ended.err


def test_until_stops_there_and_tells_the_hash(run: Path, paceline: Any) -> None:
    (first, *_) = of_kind(run, Hashed)
    ended = paceline("replay", str(run), "--until", str(HASH_EVERY))
    assert ended.code == 0
    assert ended.out.startswith(f"{HASH_EVERY} commits, ")
    assert ended.out.endswith(f"version {HASH_EVERY} has the hash {first.digest.hex()}\n")


@pytest.mark.parametrize("version", [-1, 10_000])
def test_until_a_version_that_is_not_there(version: int, run: Path, paceline: Any) -> None:
    ended = paceline("replay", str(run), "--until", str(version))
    last = len(of_kind(run, Committed))
    assert (ended.code, ended.err) == (2, f"paceline: the run has the versions 0 to {last}, but no version {version}\n")


def test_a_shell_has_what_there_is_to_see(run: Path, paceline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [
        "print(version, [push[:4] for push in pushes] == wanted)",
        "print({name: tuple(gradient.shape) for name, gradient in pushes[0].gradients.items()})",
        "print(type(model).__name__, type(optimizer).__name__, problem.name)",
    ]
    wanted = [(one.rank, one.step, one.version, one.loss) for one in of_kind(run, Pushed) if one.version == 8]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join([f"wanted = {wanted}", *asked])))
    ended = paceline("replay", str(run), "--until", "9", "--shell")
    assert ended.code == 0
    _, *answers = ended.out.replace(">>> ", "").splitlines()
    shapes = {
        "1.weight": (32, 64),
        "1.bias": (32,),
        "2.weight": (32,),
        "2.bias": (32,),
        "4.weight": (10, 32),
        "4.bias": (10,),
    }
    assert answers[:3] == ["9 True", str(shapes), "Sequential SGD norm"]


def test_a_shell_and_json_do_not_go_together(run: Path, paceline: Any) -> None:
    assert paceline("replay", str(run), "--shell", "--json").code == 2


def test_a_damaged_trace_is_told_by_block_and_byte(run: Path, paceline: Any) -> None:
    content = bytearray((run / "trace.bin").read_bytes())
    content[len(content) // 2] ^= 4
    (run / "trace.bin").write_bytes(content)
    ended = paceline("replay", str(run))
    assert ended.code == 1
    assert "trace.bin is damaged: block " in ended.err and ", which begins at byte " in ended.err


def test_the_trace_of_a_killed_server_is_replayed_as_far_as_it_goes(run: Path, paceline: Any) -> None:
    content = (run / "trace.bin").read_bytes()
    (run / "trace.bin").write_bytes(content[:-1])
    ended = paceline("replay", str(run))
    assert ended.code == 0 and "equal to the last bit; the trace ends there, before the end of the run" in ended.out


def test_what_is_no_run_or_has_no_trace(tmp_path: Path, run: Path, paceline: Any) -> None:
    ended = paceline("replay", str(tmp_path / "nowhere"))
    assert ended.code == 2 and "is not a run: replay wants the directory of one" in ended.err
    (run / "trace.bin").unlink()
    ended = paceline("replay", str(run))
    assert ended.code == 2 and "has no trace.bin: only runs with a parameter server, or" in ended.err
    options = json.loads((run / "config.json").read_text())
    options["train"]["unheard_of"] = 1
    (run / "config.json").write_text(json.dumps(options))
    (run / "trace.bin").write_bytes(b"PLTRACE0")
    assert paceline("replay", str(run)).code == 1


def test_options_of_another_version(run: Path, paceline: Any) -> None:
    options = json.loads((run / "config.json").read_text())
    options["train"]["unheard_of"] = 1
    (run / "config.json").write_text(json.dumps(options))
    ended = paceline("replay", str(run))
    assert ended.code == 2 and "options of another version" in ended.err
