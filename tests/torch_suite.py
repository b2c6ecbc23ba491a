"""Run the tests of ``torch.distributed`` that torch ships, which are for every backend.

    python tests/torch_suite.py BACKEND RANKS [TEST ...]   run them, and write a line for each that is not skipped
    python tests/torch_suite.py --rewrite                  run all, and note in torch_suite.txt who passes which

The ranks are forked, not spawned as by torch's own runner: that spares each of them the import of torch.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

BACKENDS = ("paceline", "gloo")
SIZES = (2, 3, 4)
PASSED = Path(__file__).with_suffix(".txt")
_MODULE = "torch.testing._internal.distributed.distributed_test"
_SMALL_GROUP = (1, 2)  # the ranks of which tests make a group; torch's decorator wants eight for it
_HEAD = (
    "# test, the numbers of ranks with which backend paceline passes it, and Gloo; by tests/torch_suite.py --rewrite\n"
)


def passed_before(backend: str, size: int) -> set[str]:
    """Read which tests a backend passed when the list was written."""
    rows = [line.split() for line in PASSED.read_text().splitlines() if not line.startswith("#")]
    return {row[0] for row in rows if str(size) in row[1 + BACKENDS.index(backend)]}


def run(backend: str, size: int) -> dict[str, bool]:
    """Run the tests in a process of their own; return which were not skipped, and whether they passed."""
    command = [sys.executable, __file__, backend, str(size)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    found = _outcomes(ended.stdout)
    if ended.returncode or not found:
        raise RuntimeError(f"torch's tests with {size} ranks of {backend} did not end well:\n{ended.stdout[-5000:]}")
    return found


def _outcomes(output: str) -> dict[str, bool]:
    lines = [line.split() for line in output.splitlines()]
    return {words[1]: words[0] == "passed" for words in lines if words and words[0] in ("passed", "failed")}


def counts(backend: str, size: int, found: dict[str, bool]) -> str:
    """Say how many passed, and which did not."""
    failed = ", ".join(sorted(name for name, passed in found.items() if not passed))
    return f"{backend}, {size} ranks: {sum(found.values())} of {len(found)} passed; failed: {failed or 'none'}"


def _rewrite() -> None:
    found = {}
    for size in SIZES:
        for backend in BACKENDS:
            found[backend, size] = run(backend, size)
            print(counts(backend, size, found[backend, size]), flush=True)
    _write(found)


def _write(found: dict[tuple[str, int], dict[str, bool]]) -> None:
    passed: dict[str, dict[str, str]] = {}
    for (backend, size), outcomes in found.items():
        for name in (name for name, ok in outcomes.items() if ok):
            passed.setdefault(name, dict.fromkeys(BACKENDS, ""))[backend] += str(size)
    lines = [" ".join([name, *(row[backend] or "-" for backend in BACKENDS)]) for name, row in sorted(passed.items())]
    PASSED.write_text(_HEAD + "\n".join(lines) + "\n")


def _suite(backend: str, stand_in: str) -> Any:
    """Import torch's tests as those of another backend: that decides which of them are skipped."""
    from torch.testing._internal import common_distributed

    sys.modules.pop(_MODULE, None)
    os.environ["BACKEND"] = stand_in
    if int(os.environ["WORLD_SIZE"]) > max(_SMALL_GROUP):
        common_distributed.skip_if_small_worldsize = lambda test: test
    module: Any = importlib.import_module(_MODULE)
    os.environ["BACKEND"] = backend
    module.BACKEND = _Taken(backend)
    return _forking(module)


class _Taken(str):
    """A backend's name that is also equal to Gloo's: tests ask for it where they mean any backend of CPUs."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other in ("gloo", str(self))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def _forking(module: Any) -> Any:
    import torch

    class Suite(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return Suite


class _Lines(unittest.TestResult):
    """Writes a line for each test that is not skipped."""

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._begun = time.monotonic()

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._write("passed", test)

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        super().addError(test, err)
        self._write("failed", test)
        print(self.errors[-1][1])

    addFailure = addError

    def _write(self, outcome: str, test: unittest.TestCase) -> None:
        print(f"\n{outcome} {test.id().split('.')[-1]} {time.monotonic() - self._begun:.1f} s", flush=True)


def _main(backend: str, size: str, names: list[str]) -> None:
    os.environ["WORLD_SIZE"] = size
    if backend == "paceline":
        importlib.import_module("paceline")
    with tempfile.TemporaryDirectory() as directory:
        os.environ["TEMP_DIR"] = directory
        # all_to_all is tested with MPI alone. Gloo's come last: pickle finds the classes of the module imported last.
        for_mpi, for_gloo = _suite(backend, "mpi"), _suite(backend, "gloo")
        suites = [for_gloo, for_mpi]
        wanted = names or unittest.defaultTestLoader.getTestCaseNames(suites[0])
        for name in wanted:
            kind = next((kind for kind in suites if not hasattr(getattr(kind, name), "__unittest_skip__")), None)
            if kind is not None:
                kind(name).run(_Lines())


if __name__ == "__main__":
    if sys.argv[1:] == ["--rewrite"]:
        _rewrite()
    else:
        _main(sys.argv[1], sys.argv[2], sys.argv[3:])
