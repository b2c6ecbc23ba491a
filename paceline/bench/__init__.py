"""The measurements of ``paceline bench``: one module each, and the table of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from paceline.bench import codec_steps, codecs, collectives, server, step
from paceline.bench.measuring import Row, be_worker, read_rows, result_file
from paceline.launch.supervisor import supervise

# By name: the function that every worker calls with the options, all together.
BENCHES: dict[str, Callable[..., list[Row]]] = {
    "codecs": codecs.measure,
    "codec-steps": codec_steps.measure,
    "collectives": collectives.measure,
    "step": step.measure,
    "server": server.measure,
    "server-rate": server.measure_rate,
    "server-recording": server.measure_recording,
}


def run_bench(name: str, workers: int, **options: Any) -> list[Row]:
    """Measure on this many workers, each running the hidden command ``bench-worker``; raise SystemExit if they fail."""
    with result_file() as file:
        code = supervise(["-m", "paceline", "bench-worker", name, json.dumps(options), str(file)], workers=workers)
        if code != 0:
            raise SystemExit(code)
        return read_rows(file)


def be_bench_worker(name: str, options: str, file: str) -> None:
    """Run one worker of ``run_bench``."""
    given = json.loads(options)
    backend = given.pop("backend", "paceline")
    be_worker(lambda: BENCHES[name](**given), file, backend=backend)
