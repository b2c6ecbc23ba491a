"""`paceline bench` of two commits in turns: is the later one as fast?

    python benchmarks/before_after.py OLD [NEW] [--bench step server-tcp] [--rounds 3] [--builds DIR]

OLD and NEW are commits; without NEW it is the working tree. Each is built and installed into an environment of its own,
which shares torch and all else with the one that runs this script. In each round both measure what `paceline bench`
measures, but shorter; they take turns in beginning. A ratio is NEW's time over OLD's in the same round. The table has
the median over the rounds, the lowest and the highest. Rows that run no code of ours (`barrier`, `torch ddp on gloo`,
`gloo`, `rpc`) show how much of that is chance. Steps and collectives are measured by NEW's code in both, the server by
each commit's own.

With `--builds DIR` the environments are kept there, and with `--times FILE` the times: a later run builds nothing, and
adds its rounds to those in the file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.report.table import print_table

Call = tuple[str, int, dict[str, Any]]  # name, workers and options
Times = dict[str, float]  # in microseconds, by the names of rows
Round = dict[str, Times]  # of "old" and "new"

REPOSITORY = Path(__file__).resolve().parent.parent
KB, MB = 1 << 10, 1 << 20
TRIPS = {4 * KB: 300, MB: 100, 25 * MB: 15}  # of a round with messages of this size
# By name: what is measured in a round, as arguments of ``run_bench``.
BENCHES: dict[str, list[Call]] = {
    "step": [
        ("step", 2, {"models": ["mlp", "cnn", "gpt"], "rounds": 2, "steps": 4}),
        ("step", 2, {"models": ["net3"], "rounds": 4, "steps": 20}),  # of which a step takes 2 ms
    ],
    "collectives": [("collectives", 2, {"sizes": [4 * KB, MB, 25 * MB], "seconds": 0.05})],
    **{
        name: [
            ("server", 2, {"sizes": [size], "rounds": 5, "trips": trips, "over_tcp": over_tcp})
            for size, trips in TRIPS.items()
        ]
        for name, over_tcp in (("server", False), ("server-tcp", True))
    },
    "server-rate": [("server-rate", 4, {"seconds": 3.0})],
}
QUICK = {"models": ["net3"], "rounds": 1, "steps": 2, "sizes": [4 * KB], "trips": 2, "seconds": 0.1}
PROGRAM = """
import json, sys
from paceline.bench import run_bench
calls = json.loads(sys.argv[1])
print(json.dumps([row for name, workers, options in calls for row in run_bench(name, workers, **options)]))
"""
SHARED_CODE = ("step.py", "collectives.py")  # of paceline/bench: they call what both commits have


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", metavar="OLD", help="a commit")
    parser.add_argument("new", metavar="NEW", nargs="?", help="another one; left out, the working tree")
    parser.add_argument("--bench", nargs="+", choices=list(BENCHES), default=list(BENCHES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--builds", type=Path, metavar="DIR", help="keep what is built here, and use it if it is there")
    parser.add_argument("--times", type=Path, metavar="FILE", help="add the rounds to those in this file")
    parser.add_argument("--quick", action="store_true", help="only to see that it works; measures nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args()
    with folder_for(arguments.builds) as folder:
        new = build(folder / "new", arguments.new)
        old = build(folder / "old", arguments.old, measured_by=folder / "new")
        rounds = measure({"old": old, "new": new}, arguments)
    rows = [row for bench, found in rounds.items() for row in ratios(bench, found)]
    if arguments.json:
        print(json.dumps({"rows": rows}))
        return
    print_table(
        rows,
        {"bench": "", "row": "", "old_us": ".0f", "new_us": ".0f"}
        | {"ratio": ".3f", "lowest": ".3f", "highest": ".3f", "rounds": "d"},
    )


# Builds ---------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def folder_for(builds: Path | None) -> Iterator[Path]:
    """The folder of the builds, or a temporary one."""
    if builds is not None:
        builds.mkdir(parents=True, exist_ok=True)
        yield builds.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="paceline-before-after-") as folder:
        yield Path(folder)


def build(folder: Path, commit: str | None, *, measured_by: Path | None = None) -> Path:
    """Install a commit, or the working tree, into a new environment; return its Python."""
    source, python = folder / "source", folder / "environment" / "bin" / "python"
    if (folder / "ready").exists():
        return python
    take_source(source, commit)
    if measured_by is not None:
        for name in SHARED_CODE:
            shutil.copy(measured_by / "source" / "paceline" / "bench" / name, source / "paceline" / "bench" / name)
    venv.create(folder / "environment", symlinks=True)
    (site,) = (folder / "environment").glob("lib/python*/site-packages")
    (site / "shared.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    install = ["install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", str(source)]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install], check=True)
    # Without a compiler it installs too, and would be measured without shared memory.
    subprocess.run([python, "-P", "-c", "import paceline.native._core"], check=True, cwd=folder)
    (folder / "ready").touch()
    return python


def take_source(folder: Path, commit: str | None) -> None:
    if commit is None:
        unwanted = shutil.ignore_patterns(".*", "*.so", "*.egg-info", "__pycache__", "build")
        shutil.copytree(REPOSITORY, folder, ignore=unwanted)
        return
    folder.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", commit], cwd=REPOSITORY, check=True, capture_output=True).stdout
    subprocess.run(["tar", "--extract", "--directory", folder], input=archive, check=True)


# Measurements ---------------------------------------------------------------------------------------------------------


def measure(pythons: dict[str, Path], arguments: argparse.Namespace) -> dict[str, list[Round]]:
    """The rounds of every bench, with those of the file of times."""
    file: Path | None = arguments.times
    rounds: dict[str, list[Round]] = json.loads(file.read_text()) if file is not None and file.exists() else {}
    for bench in arguments.bench:
        found = rounds.setdefault(bench, [])
        for _ in range(1 if arguments.quick else arguments.rounds):
            order = list(pythons) if len(found) % 2 == 0 else list(reversed(pythons))
            found.append({name: times_of(bench, pythons[name], arguments.quick) for name in order})
            if file is not None:
                file.write_text(json.dumps(rounds))
    return rounds


def times_of(bench: str, python: Path, quick: bool) -> Times:
    """Run a bench once: its times in microseconds, by the names of its rows."""
    calls = BENCHES[bench][:1] if quick else BENCHES[bench]
    if quick:
        calls = [
            (name, 2, options | {key: QUICK[key] for key in options if key in QUICK}) for name, _, options in calls
        ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PYTHONWARNINGS"] = "ignore"  # torch's own
    command = [str(python), "-P", "-c", PROGRAM, json.dumps(calls)]
    with tempfile.TemporaryDirectory() as elsewhere:  # not the repository, whose package would come first
        ended = subprocess.run(command, check=True, cwd=elsewhere, env=environment, stdout=subprocess.PIPE)
    return {name: time for row in json.loads(ended.stdout) for name, time in times_in(bench, row).items()}


def times_in(bench: str, row: dict[str, Any]) -> Times:
    if bench == "step":
        return {f"{row['model']}, {row['way']}": row["step_ms"] * 1e3}
    if bench == "collectives":
        return {f"{size(row)}, {row['buffers']}, {way}": row[f"{way}_us"] for way in ("ours", "any", "gloo")}
    if bench == "server-rate":
        return {f"{size(row)}, {row['workers']} workers at once": 1e6 / row["pushes_per_second"]}
    return {f"{size(row)}, {row['way']}": row["trip_us"]}


def size(row: dict[str, Any]) -> str:
    return f"{row['bytes'] // MB} MB" if row["bytes"] >= MB else f"{row['bytes'] // KB} KB"


def ratios(bench: str, rounds: list[Round]) -> list[dict[str, Any]]:
    """Compare the rows of a bench."""
    return [
        {
            "bench": bench,
            "row": name,
            "old_us": statistics.median(each["old"][name] for each in rounds),
            "new_us": statistics.median(each["new"][name] for each in rounds),
            "ratio": statistics.median(found),
            "lowest": min(found),
            "highest": max(found),
            "rounds": len(found),
        }
        for name in rounds[0]["old"]
        if name in rounds[0]["new"] and (found := [each["new"][name] / each["old"][name] for each in rounds])
    ]


if __name__ == "__main__":
    main()
