"""Fixtures every test may use."""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import unittest.mock
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import hypothesis
import pytest
import torch
import torch.distributed as dist
from xdist.scheduler import LoadScopeScheduling

from paceline import native
from paceline.commands.cli import main

T = TypeVar("T")

# A shell without job control starts background jobs with SIGINT ignored. Processes that tests start inherit that, and
# those that are to end by Ctrl-C would never end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Bits depend on the number of threads; here, since fixtures of wider scope run before any function's.
torch.set_num_threads(1)

# Times are noisy on shared machines, so no example has a deadline.
hypothesis.settings.register_profile("quick", deadline=None, max_examples=25)
hypothesis.settings.register_profile("soak", deadline=None, max_examples=400)


def one_at_a_time(function: Callable[..., T]) -> Callable[..., T]:
    """The function, for one thread at a time."""
    lock = threading.RLock()

    @functools.wraps(function)
    def called(*arguments: Any, **options: Any) -> T:
        with lock:
            return function(*arguments, **options)

    return called


# Python before 3.11.8 raises SystemError when two threads parse at once (CPython's issue 106905). Tests do: one thread
# prints a traceback, which parses its lines, while another draws an example, and Hypothesis reads its source.
if sys.version_info < (3, 11, 8):
    ast.parse = one_at_a_time(ast.parse)

_GLOO = "gloo"
ABANDONED = "abandoned"  # the name of a thread whose server has failed

REPOSITORY = Path(__file__).resolve().parent.parent

# The tests of each of these share what a fixture takes long to make: with ``-n`` one process runs them all.
SHARING = {
    f"test_{name}.py"
    for name in ("ddp", "killed", "killed_workers", "live_policies", "real_programs", "replay", "report_browser")
}


def soaking(config: pytest.Config) -> bool:
    """Whether these are the long tests, as ``make soak`` runs them."""
    return bool(config.getoption("markexpr") == "soak")


def pytest_configure(config: pytest.Config) -> None:
    """Before any test is imported, since settings of its own take the rest from the profile."""
    hypothesis.settings.load_profile("soak" if soaking(config) else "quick")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is long by itself: laws with many examples, all but one case over Gloo, all but a sample of cases."""
    over_gloo: set[str] = set()
    cases: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if not isinstance(item, pytest.Function):
            continue
        is_law = hypothesis.is_hypothesis_test(item.function) or item.get_closest_marker("laws")
        if soaking(config) and is_law:
            item.add_marker("soak")
        if native.available() and hasattr(item, "callspec") and item.callspec.params.get("world") == _GLOO:
            test = item.nodeid.partition("[")[0]
            if test in over_gloo:
                item.add_marker("soak")
            over_gloo.add(test)
        if item.get_closest_marker("sampled") and not item.get_closest_marker("soak"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for test, items_of_test in cases.items():
        sample = items_of_test[0].get_closest_marker("sampled")
        assert sample is not None
        every = min(sample.args[0], len(items_of_test))
        first = zlib.crc32(test.encode()) % every  # not the same for all tests, so that some test has each policy
        for number, item in enumerate(items_of_test):
            if number % every != first:
                item.add_marker("soak")


class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Gives processes one test after the other, or all of a file that shares."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if Path(file).name in SHARING else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling | None:
    """Use that one unless another was asked for."""
    return Scheduling(config, log) if config.getoption("dist") == "load" else None


def pytest_collection_finish() -> None:
    """What was imported is there to stay: garbage is then looked for among the few things that tests make."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def file() -> Iterator[int]:
    """A file without a name, as processes share it."""
    descriptor = os.memfd_create("test")
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that can die in a worker's place."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture(autouse=True)
def _one_thread_and_fixed_seed() -> None:
    """Every test starts with one thread and from a known seed, whatever the one before it did."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


def _does_no_more(thread: threading.Thread) -> bool:
    """Whether a thread can only wait.

    One that waits in Gloo for a worker that has failed, or for a server that has, cannot be ended: it fails at its
    timeout. That of a group makes the calls that it is given, and so do those of torch's compiler.
    """
    return thread.name in (_GLOO, ABANDONED) or thread.name.startswith(("paceline group", "ThreadPoolExecutor"))


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    """A thread that a test leaves behind would draw from the random streams of the tests after it."""
    before = set(threading.enumerate())
    yield
    end = time.monotonic() + 10
    while left := [each.name for each in threading.enumerate() if each not in before and not _does_no_more(each)]:
        assert time.monotonic() < end, f"the test has left threads: {left}"
        time.sleep(0.005)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The directory of real data sets, or a skip: a user's machine has none."""
    path = Path(os.environ.get("PACELINE_TEST_DATA", REPOSITORY.parent / "shared" / "data"))
    if not (path / "mnist").is_dir():
        pytest.skip(f"no real data in {path}; set PACELINE_TEST_DATA")
    return path


class World:
    """Run a function on n workers that are threads of this process, each with a process group of its own."""

    deadline = 200.0

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def _group(self, store: Any, rank: int, workers: int, timeout: float) -> Any:
        """Workers meet however late they come; the timeout is that of their calls."""
        if self._backend == _GLOO:
            group = dist.ProcessGroupGloo(store, rank, workers, timedelta(seconds=self.deadline))
            group._set_default_timeout(timedelta(seconds=timeout))
            return group
        from paceline.collectives.backend import ProcessGroup

        return ProcessGroup(store, rank, workers, timedelta(seconds=self.deadline), "world")

    @contextlib.contextmanager
    def _short_calls(self, timeout: float) -> Iterator[None]:
        if self._backend == _GLOO:
            yield
            return
        from shared_ranks import hurried

        with unittest.mock.patch("paceline.native._core.join", hurried(timeout)):
            yield

    def __call__(self, workers: int, work: Callable[[Any], T], *, timeout: float = 60.0) -> list[T]:
        """Call ``work(group)`` on every worker and give their results; if one fails, raise its error."""
        with self._short_calls(timeout):
            return self._run(workers, work, timeout)

    def _run(self, workers: int, work: Callable[[Any], T], timeout: float) -> list[T]:
        store = dist.HashStore()  # type: ignore[attr-defined]
        results: dict[int, T] = {}
        failures: list[BaseException] = []
        groups: list[Any] = []

        def worker(rank: int) -> None:
            try:
                group = self._group(store, rank, workers, timeout)
                groups.append(group)
                results[rank] = work(group)
            except BaseException as error:
                failures.append(error)

        threads = [
            threading.Thread(target=worker, args=(rank,), daemon=True, name=self._backend) for rank in range(workers)
        ]
        for thread in threads:
            thread.start()
        end = time.monotonic() + self.deadline
        while any(thread.is_alive() for thread in threads) and not failures and time.monotonic() < end:
            threads[0].join(0.01)
            time.sleep(0.001)
        if failures:
            failure = failures[0]
            # Its neighbours wait for it until their group's timeout.
            for group in groups:
                group.abort()
            for thread in threads:
                thread.join(timeout if self._backend != _GLOO else 0)
            raise failure
        assert len(results) == workers, f"workers {sorted(set(range(workers)) - set(results))} are still running"
        return [results[rank] for rank in range(workers)]


@pytest.fixture(params=[_GLOO, "shared memory"])
def world(request: pytest.FixtureRequest) -> World:
    """Workers as threads, over each way of agreeing on one host."""
    if request.param != _GLOO and not native.available():
        pytest.skip(native.reason())
    return World(request.param)


@pytest.fixture
def overlapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets are reduced while backward runs, also where the machine has no core to spare for it."""
    monkeypatch.setattr("paceline.peers.group.Peers.overlaps", lambda _: True)


@dataclass(frozen=True)
class Outcome:
    code: Any
    out: str
    err: str


@pytest.fixture
def paceline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """The command in a directory of its own, as a function of its arguments."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PACELINE_DATA", raising=False)

    def call(*arguments: str) -> Outcome:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        streams = capsys.readouterr()
        return Outcome(caught.value.code, streams.out, streams.err)

    return call
