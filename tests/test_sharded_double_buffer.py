"""What a killed server leaves behind that holds a part of the parameters: the version that the first has decided on."""

from __future__ import annotations

import functools
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import quick
from test_double_buffer import OPTIMIZERS, undisturbed
from torch import nn

from paceline.aggregators import parse_aggregator
from paceline.errors import CommError
from paceline.record.fingerprints import hash_of
from paceline.server.shard_server import ShardServer
from paceline.store import double_buffer as double_buffer
from paceline.store.commit_rule import CommitRule
from paceline.store.layout import Arena
from paceline.store.memory import Copied, SharedMemory
from paceline.store.partition import layouts_of
from paceline.store.shard_state import write_state
from paceline.train_state import TrainState, parameters_of
from paceline.transport import messages as wire

KEPT = ["sgd", "momentum", "adam", "replaces"]
REMEMBERING = "delay-compensated(scale=2.0, momentum=0.95)"


class Quiet:
    """In place of the first server's line, and of the listener."""

    remote = False

    def send(self, message: wire.Message) -> None:
        assert isinstance(message, wire.Done), message

    def keep_what_waits(self) -> None: ...


class Shard:
    """A server that holds the second half of a model, in a file, and orders to it; what it has found there it keeps.

    The gradients of a commit depend on its number and ``source``.
    """

    def __init__(self, file: int, optimizer: str, *, version: int | None = None, aggregator: str = "mean") -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 4), nn.Linear(4, 2))
        rule = CommitRule(adds_up=True, aggregator=parse_aggregator(aggregator))
        made = OPTIMIZERS[optimizer](model.parameters())
        self.train_state = rule.remembering(TrainState(model=model, optimizers=[made]))
        self._layouts = layouts_of(model, 2, with_reads=rule.with_reads)[1]
        sizes = {"down": self._layouts.down.nbytes, "up": self._layouts.up.nbytes}
        self.memory = SharedMemory(file, **sizes, slots=1, create=True)
        if version is None:
            for parameter, view in zip(
                self._layouts.parameters, self._layouts.down.views(self.memory.down), strict=True
            ):
                view.copy_(parameter.detach())
        state = write_state(file, self.train_state, self._layouts) if version is None else 0
        quiet = cast(Any, Quiet())
        self.server = ShardServer(self.train_state, shard=1, servers=2, file=file, listener=quiet)
        self.server._first = quiet
        self.order(wire.Begin, version or 0, 1, state, True, aggregator, "gradient")
        self.train_state = self.server._train_state

    def order(self, kind: Callable[..., wire.Message], *values: Any) -> None:
        self.server._obey(kind(self.server._orders + 1, *values))

    @property
    def double_buffer(self) -> double_buffer.DoubleBuffer:
        assert self.server._double_buffer is not None
        return self.server._double_buffer

    def ready(self, source: int = 0) -> None:
        version = self.memory.version + 1
        dice = torch.Generator().manual_seed(1000 * version + source)
        for flat in Arena(self._layouts.up, self.memory.slot(0)).flat:
            flat.copy_(torch.randn(flat.shape, generator=dice))
        self.order(wire.Take, 0, version, 1, True, True, b"\xff")
        self.order(wire.Ready, version)

    def commit(self, source: int = 0) -> None:
        """Make a commit; what becomes of it, the first server decides."""
        self.ready(source)
        self.order(wire.Update, self.memory.version + 1, float("nan"))

    def hash(self) -> bytes:
        """Of all that an update depends on."""
        remembered = [
            torch.as_tensor(value)
            for optimizer in self.train_state.holders
            for parameter in parameters_of(optimizer)
            for _, value in sorted(optimizer.state.get(parameter, {}).items())
        ]
        return hash_of([*self._layouts.parameters, *remembered])


@functools.cache
def hashes(optimizer: str, count: int, aggregator: str = "mean") -> list[bytes]:
    return undisturbed(lambda file: Shard(file, optimizer, aggregator=aggregator), count)


# What has happened when a shard is killed, beside what its first server has decided; each gives whether that is more.


def idle(shard: Shard) -> bool:
    return False


def ready(shard: Shard) -> bool:
    shard.ready(source=1)
    return False


def under_way(shard: Shard) -> bool:
    shard.ready(source=1)
    shard.train_state.update()
    return False


def noting(shard: Shard) -> bool:
    """The new tensors are placed, and half of the note is written."""
    under_way(shard)
    shard.double_buffer._place_tensors()
    side = (shard.double_buffer._word(double_buffer._STAND) // 2 + 1) % 2
    shard.double_buffer._notes[side][:10] = b"x" * 10
    return False


def whole(shard: Shard) -> bool:
    """The commit is made, and the first server was killed before it was decided."""
    shard.commit(source=1)
    return False


def decided(shard: Shard) -> bool:
    shard.commit()
    return True


def told(shard: Shard) -> bool:
    shard.commit()
    shard.order(wire.Decided)
    return True


def catching_up(shard: Shard) -> bool:
    """The spare is torn."""
    shard.commit()
    for stretch in shard.double_buffer._stretches:
        stretch.spare[: len(stretch.spare) // 2 + 1] = 77
    return True


def going_back(shard: Shard) -> bool:
    """And half of it is done."""
    version = shard.memory.version
    shard.commit(source=1)
    shard.double_buffer.note_of(version)
    for stretch in shard.double_buffer._stretches:
        stretch.work[: len(stretch.work) // 2] = 77
    return False


POINTS = [idle, ready, under_way, noting, whole, decided, told, catching_up, going_back]


@settings(deadline=None)
@given(
    optimizer=st.sampled_from(KEPT),
    aggregator=st.sampled_from(["mean", REMEMBERING]),
    lives=st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.sampled_from(POINTS)), min_size=1, max_size=6),
)
def test_a_shard_goes_on_from_what_was_decided(optimizer: str, aggregator: str, lives: list[Any]) -> None:
    file = os.memfd_create("test")
    wanted = hashes(optimizer, 30, aggregator)
    shard, version = Shard(file, optimizer, aggregator=aggregator), 0
    for commits, at_leisure, killed in lives:
        for _ in range(commits):
            shard.commit()
            version += 1
            if at_leisure:
                shard.order(wire.Decided)
        version += killed(shard)
        shard = Shard(file, optimizer, version=version, aggregator=aggregator)
        assert (shard.memory.version, shard.hash()) == (version, wanted[version])
    shard.commit()
    assert shard.hash() == wanted[version + 1]
    os.close(file)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_versions_that_do_not_fit_together_are_named(file: int, optimizer: str) -> None:
    shard = Shard(file, optimizer)
    for _ in range(3):
        shard.commit()
    for version in (1, 4):
        with pytest.raises(CommError, match=f"goes on from version {version}, and of a part of it version 3 was kept"):
            Shard(file, optimizer, version=version)
    under_way(shard)
    with pytest.raises(CommError, match=r"goes on from version 2, and .* version 3 was kept"):
        Shard(file, optimizer, version=2)  # for 3 was decided, or there would be no 4 under way


def test_nothing_kept(file: int) -> None:
    with pytest.raises(CommError, match="of a part of it nothing was kept"):
        Shard(file, "sgd", version=0)


def test_a_crew_that_begins_anew_takes_the_state_that_it_is_given(file: int) -> None:
    """The first server was killed before it had anything, and what the others had of it does not count."""
    for _ in range(2):
        shard = Shard(file, "momentum")
        assert (shard.memory.version, shard.hash()) == (0, hashes("momentum", 2)[0])
        shard.commit()
    shard.commit()
    assert Shard(file, "momentum", version=2).hash() == hashes("momentum", 2)[2]


def test_the_state_for_a_checkpoint_does_no_harm_to_what_is_kept(file: int) -> None:
    shard = Shard(file, "adam")
    shard.commit()
    shard.order(wire.Tell)
    shard.commit()
    assert Shard(file, "adam", version=1).hash() == hashes("adam", 2)[1]


@pytest.mark.processes
@pytest.mark.parametrize("kills", quick([8, 50], 8))
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_killed_at_any_instant_it_has_what_was_decided(file: int, optimizer: str, kills: int) -> None:
    """A child commits as fast as it can; a commit is decided when it says so by a pipe, and not if it is killed."""
    source = random.Random(optimizer)
    wanted = hashes(optimizer, 30)
    Shard(file, optimizer)
    version = 0
    for _ in range(kills):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                shard = Shard(file, optimizer, version=version)
                while True:
                    shard.commit()
                    os.write(writing, b"c")
                    if source.random() < 0.5:
                        shard.order(wire.Decided)
            finally:
                os._exit(1)
        os.close(writing)
        commits = len(os.read(reading, 1))
        time.sleep(source.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        while more := os.read(reading, 1 << 16):
            commits += len(more)
        os.close(reading)
        version += commits
        if version >= len(wanted):
            wanted = hashes(optimizer, 2 * version)
        found = Shard(file, optimizer, version=version)
        assert found.hash() == wanted[version], f"version {version}"
    assert version > kills


def test_whoever_reads_knows_that_a_server_was_killed_while_it_wrote(file: int) -> None:
    memory = SharedMemory(file, down=64, up=0, slots=1, create=True)
    for wrote in (True, False):
        child = os.fork()
        if child == 0:
            memory.begin_writing(1.0)
            if wrote:
                memory.wrote()
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        assert memory.read(0, lambda: None) is (Copied.WHOLE if wrote else Copied.TORN)
    memory.wrote()  # by the one in its place
    assert memory.read(0, lambda: None) is Copied.WHOLE
