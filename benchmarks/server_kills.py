"""The server and its workers killed at random moments, again and again: is any acknowledged commit lost?

    python benchmarks/server_kills.py [--server-kills 50] [--worker-kills 100] [--policy "k-async(k=2)"] [--servers 1]
        [--json]

Real workers train digits. The server, or any one of several, is killed (SIGKILL) whenever it has committed
something since it came back, workers in between; others take their places. Then the run is stopped by SIGTERM and
replayed from its first step in this process: every push, and the hash of the parameters that each new server has found,
must be equal to the last bit. No worker may have seen a version that a server did not find again, and every batch of
the epochs that are over must have been committed exactly once. The exit code is 1 if one of it is not so, or the target
accuracy is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from replay import processes_of, replay

from paceline.problems import ProblemOptions, load_problem
from paceline.record.checkpoint import read_checkpoint
from paceline.record.trace import Began, Committed, Trace
from paceline.replay.plan import read_plan
from paceline.training.train import evaluate

MARK = "PACELINE_BENCHMARK_MARK"
PATIENCE = 120.0  # seconds for a server to come back and commit
LOST = "; this worker had "  # said by a worker that has seen a later version than the server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server-kills", type=int, default=50)
    parser.add_argument("--worker-kills", type=int, default=100)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--policy", default="k-async(k=2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a run of seconds, to see that it works; measures nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.server_kills, arguments.worker_kills, arguments.workers = 1, 1, 2
    with tempfile.TemporaryDirectory(prefix="paceline-benchmark-") as name:
        run = Path(name) / "run"
        result = {**disturbed_run(run, arguments), **look_at(run)}
    good = [result["equal"], result["exactly_once"], result["versions_lost"] == 0]
    good.append(arguments.quick or result["accuracy"] >= result["target"])
    if arguments.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key:>16}  {value}")
    sys.exit(0 if all(good) else 1)


def disturbed_run(run: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train, kill as often as wanted, and stop."""
    mark = f"paceline-{os.getpid()}-{time.time_ns()}"
    command = [
        *[sys.executable, "-m", "paceline", "train", "digits", "--json", "--run", str(run), "--epochs", "1000000"],
        *["--workers", str(arguments.workers), "--policy", arguments.policy, "--respawn", "--save-every", "200"],
        *["--servers", str(arguments.servers), "--seed", str(arguments.seed)],
        *["--delay", "exp(1)", "--delay-unit", "5ms"],
    ]
    said = run.with_name("stderr")
    with said.open("w") as errors:
        environment = {**os.environ, MARK: mark, "PYTHONFAULTHANDLER": "1"}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=errors)
    began = time.monotonic()
    try:
        disturb(process, run, mark, arguments)
        process.send_signal(signal.SIGTERM)
        code = process.wait(PATIENCE)
    except (TimeoutError, subprocess.TimeoutExpired) as error:
        process.send_signal(signal.SIGABRT)  # it then says where it is
        process.wait()
        sys.exit(f"{error}\n{said.read_text()[-5000:]}")
    finally:
        process.kill()
    if code != 130:  # as after Ctrl-C
        sys.exit(f"the run ended with code {code}:\n{said.read_text()[-3000:]}")
    return {
        "servers": arguments.servers,
        "server_kills": arguments.server_kills,
        "worker_kills": arguments.worker_kills,
        "seconds": round(time.monotonic() - began, 1),
        "versions_lost": said.read_text().count(LOST),
    }


def disturb(process: subprocess.Popen[bytes], run: Path, mark: str, arguments: argparse.Namespace) -> None:
    """Kill the server, each time after it has committed something, and workers at any time in between."""
    dice = random.Random(arguments.seed)
    targets = ["server"] * arguments.server_kills + ["worker"] * arguments.worker_kills
    dice.shuffle(targets)
    for target in targets:
        await_commits(process, run, dice.randint(1, 40))
        time.sleep(dice.uniform(0, 0.05))
        if target == "server":
            victims = [dice.choice(processes_of(mark, "PACELINE_ROLE=server"))]
        else:
            victims = processes_of(mark, f"RANK={dice.randrange(arguments.workers)}")
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
    await_commits(process, run, 300)


def await_commits(process: subprocess.Popen[bytes], run: Path, count: int) -> None:
    """Wait until the trace has grown by so many commits; it has about 150 bytes for each."""
    trace, end = run / "trace.bin", time.monotonic() + PATIENCE
    wanted = (trace.stat().st_size if trace.exists() else 1000) + 150 * count
    while not trace.exists() or trace.stat().st_size < wanted:
        if process.poll() is not None or time.monotonic() > end:
            raise TimeoutError(f"no {count} commits within {PATIENCE:.0f} s")
        time.sleep(0.01)


def look_at(run: Path) -> dict[str, Any]:
    """Replay the run, and count its batches."""
    trace = Trace(run / "trace.bin")
    plan = read_plan(trace)
    used = Counter(batch for commit in plan.commits for push in commit.pushes for batch in push.batches)
    state = read_checkpoint(max((run / "checkpoints").glob("*.safetensors")))
    done = [count for batch, count in used.items() if batch.epoch < state["data"]["epoch"]]
    per_epoch = len({batch.number for batch in used if batch.epoch == 0})
    problem = load_problem("digits", ProblemOptions())
    model = problem.make_model()
    model.load_state_dict(state["trainee"]["model"])
    _, accuracy, _ = evaluate(model, problem)
    return {
        "servers_found": sum(isinstance(record, Began) and record.replaced for record in trace),
        "commits": sum(isinstance(record, Committed) for record in trace),
        "epochs": state["data"]["epoch"],
        "exactly_once": set(used.values()) == {1} and len(done) == per_epoch * state["data"]["epoch"],
        "accuracy": accuracy,
        "target": problem.target,
        **{key: value for key, value in replay(run).items() if key in ("equal", "pushes", "hashes", "difference")},
    }


if __name__ == "__main__":
    main()
