"""What a killed server leaves behind: a whole version, and none that was acknowledged is lost."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any, Protocol

import pytest
import torch
from quick import quick
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

from paceline.errors import CommError
from paceline.record.fingerprints import hash_of
from paceline.store.double_buffer import DoubleBuffer, read_note
from paceline.store.gathering import adopt
from paceline.store.layout import ModelLayouts
from paceline.store.memory import HEAD, SharedMemory
from paceline.store.remembered import Remembered
from paceline.train_state import TrainState

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.1),
    "momentum": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: Adam(parameters, lr=0.1),
}


class Replaces(Optimizer):
    """An optimizer that makes its state anew at every step, counts in plain numbers, and begins late with some."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for place, parameter in enumerate(self.param_groups[0]["params"]):
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                if state["count"] > 3 * place:
                    state["mean"] = state.get("mean", torch.zeros_like(parameter)) * 0.9 + parameter.grad
                    parameter.sub_(state["mean"], alpha=0.01 * state["count"])


class Forgets(SGD):
    """An optimizer that appends to a list, and every third step forgets what it had of the first parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        state = self.state[self.param_groups[0]["params"][0]]
        seen = state.setdefault("seen", [])
        seen.append(len(seen))
        state["last"] = torch.tensor(float(len(seen)))
        if len(seen) % 3 == 0:
            del state["last"]
        with torch.no_grad():
            self.param_groups[0]["params"][0].mul_(0.9 ** (len(seen) + len(state)))


OPTIMIZERS["replaces"] = Replaces
OPTIMIZERS["forgets"] = lambda parameters: Forgets(parameters, lr=0.1)
KEPT = list(OPTIMIZERS)


class Server:
    """A model whose updates are kept in a double buffer.

    The gradients of an update depend on its number, and on what an aggregator remembers of those before.
    """

    def __init__(self, file: int, optimizer: str, size: int = 40) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, size), nn.BatchNorm1d(size), nn.Linear(size, 2))
        made = OPTIMIZERS[optimizer](model.parameters())
        schedulers = [StepLR(made, 3, 0.9)] if optimizer != "forgets" else []  # which change the rates at every step
        self.remembered = Remembered(model.parameters())
        self.train_state = TrainState(model=model, optimizers=[made], schedulers=schedulers, remembered=self.remembered)
        layouts = ModelLayouts(model)
        memory = SharedMemory(file, down=layouts.down.nbytes, up=layouts.up.nbytes, slots=1, create=True)
        self.double_buffer = DoubleBuffer(file, self.train_state, memory.down, HEAD)
        found = read_note(file)
        if found is not None:
            self.double_buffer.recover(found)
        adopt(layouts, memory.down, found=found is not None)
        self.version = 0 if found is None else found["version"]
        if found is None:
            self.double_buffer.begin(0, {"mine": 0})
        else:
            assert found["mine"] == self.version

    def commit(self) -> None:
        self.double_buffer.before_update()
        torch.manual_seed(self.version)
        for parameter in self.train_state.model.parameters():
            parameter.grad = self.remembered.of(parameter).mul_(0.5).add_(torch.randn_like(parameter)).clone()
        self.train_state.update()
        for buffer in self.train_state.model.buffers():
            buffer += 1
        self.version += 1
        self.double_buffer.after_update(self.version, {"mine": self.version})

    def hash(self) -> bytes:
        return hash_of([*self.train_state.model.parameters(), *self.train_state.model.buffers()])


class Committing(Protocol):
    def commit(self) -> None: ...
    def hash(self) -> bytes: ...


def undisturbed(start: Callable[[int], Committing], count: int) -> list[bytes]:
    """The hash of every version of a server that starts in a file and is never killed."""
    descriptor = os.memfd_create("test")
    server = start(descriptor)
    found = [server.hash()]
    for _ in range(count):
        server.commit()
        found.append(server.hash())
    os.close(descriptor)
    return found


def hashes(optimizer: str, count: int) -> list[bytes]:
    return undisturbed(lambda file: Server(file, optimizer), count)


def test_nothing_is_found_where_nothing_was_kept(file: int) -> None:
    assert read_note(file) is None


@pytest.mark.parametrize("optimizer", KEPT)
def test_a_successor_goes_on_as_if_nothing_had_happened(file: int, optimizer: str) -> None:
    wanted = hashes(optimizer, 12)
    for version in range(0, 12, 3):
        server = Server(file, optimizer)
        assert (server.version, server.hash()) == (version, wanted[version])
        for _ in range(3):
            server.commit()
            server.double_buffer.catch_up() if server.version % 2 else None
    assert server.hash() == wanted[12]


@pytest.mark.parametrize("optimizer", KEPT)
def test_an_update_that_was_broken_off_is_undone(file: int, optimizer: str) -> None:
    wanted = hashes(optimizer, 6)
    for version in range(6):
        server = Server(file, optimizer)
        server.double_buffer.before_update()
        for parameter in server.train_state.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        server.train_state.update()
        server = Server(file, optimizer)
        assert (server.version, server.hash()) == (version, wanted[version])
        server.commit()
    assert Server(file, optimizer).hash() == wanted[6]


def test_notes_between_commits_are_found(file: int) -> None:
    server = Server(file, "adam")
    server.commit()
    wanted = server.hash()
    for told in range(3):
        server.double_buffer.note_again(server.version, {"mine": server.version, "told": told})
    found = read_note(file)
    assert found is not None and (found["told"], found["version"]) == (2, 1)
    server.double_buffer.before_update()
    for parameter in server.train_state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    server.train_state.update()
    assert Server(file, "adam").hash() == wanted


@pytest.mark.parametrize("optimizer", KEPT)
def test_a_successor_that_notes_something_and_is_killed_too_loses_nothing(file: int, optimizer: str) -> None:
    wanted = hashes(optimizer, 8)
    for version in range(8):
        for _ in range(2):
            server = Server(file, optimizer)
            assert (server.version, server.hash()) == (version, wanted[version])
            server.double_buffer.note_again(version, {"mine": version})
        Server(file, optimizer).commit()
    assert Server(file, optimizer).hash() == wanted[8]


def test_pushes_that_waited_are_counted(file: int) -> None:
    server = Server(file, "sgd")
    server.commit()
    server.double_buffer.taken(3)
    found = read_note(file)
    assert found is not None and found["taken"] == 3
    server.commit()
    found = read_note(file)
    assert found is not None and found["taken"] == 0


class Odd(SGD):
    """An optimizer with a state that no checkpoint can hold."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.state[self.param_groups[0]["params"][0]]["function"] = print


OPTIMIZERS["odd"] = lambda parameters: Odd(parameters, lr=0.1)


class Flat(SGD):
    """An optimizer whose tensors are views of one, which it changes as a whole."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        if not self.state:
            self.flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
            views = torch.split(self.flat, [parameter.numel() for parameter in parameters])
            for parameter, view in zip(parameters, views, strict=True):
                self.state[parameter]["mean"] = view
        self.flat.mul_(0.9)
        with torch.no_grad():
            for parameter in parameters:
                mean = self.state[parameter]["mean"].add_(parameter.grad.flatten())
                parameter.sub_(mean.view_as(parameter), alpha=0.1)


class Apart(SGD):
    """An optimizer that remembers something of no parameter in particular."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.state["steps"] = self.state.get("steps", 0) + 1  # type: ignore[index, call-overload]


OPTIMIZERS["flat"] = lambda parameters: Flat(parameters, lr=0.1)
OPTIMIZERS["apart"] = lambda parameters: Apart(parameters, lr=0.1)


@pytest.mark.parametrize("optimizer", ["odd", "flat", "apart"])
def test_a_state_that_cannot_be_kept_is_told_and_does_no_harm(
    file: int, caplog: pytest.LogCaptureFixture, optimizer: str
) -> None:
    server = Server(file, optimizer)
    for _ in range(3):
        server.commit()
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "from now on the run ends if its server is killed, to be resumed from a checkpoint"
    ]
    with pytest.raises(CommError, match="was not kept"):
        read_note(file)


@pytest.mark.processes
@pytest.mark.parametrize("kills", quick([8, 50], 8))
@pytest.mark.parametrize("optimizer", ["momentum", "adam", "replaces"])
def test_killed_at_any_instant_it_loses_nothing_acknowledged(file: int, optimizer: str, kills: int) -> None:
    """A child commits as fast as it can and acknowledges by a pipe; it is killed again and again."""
    source = random.Random(optimizer)
    wanted = hashes(optimizer, 1)
    for _ in range(kills):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                server = Server(file, optimizer)
                while True:
                    server.commit()
                    os.write(writing, server.version.to_bytes(8, "little"))
            finally:
                os._exit(1)
        os.close(writing)
        told = os.read(reading, 8)  # it has begun
        time.sleep(source.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        while more := os.read(reading, 1 << 16):
            told += more
        os.close(reading)
        acknowledged = int.from_bytes(told[-8:], "little")
        found = Server(file, optimizer)
        assert found.version in (acknowledged, acknowledged + 1)
        if found.version >= len(wanted):
            wanted = hashes(optimizer, 2 * found.version)
        assert found.hash() == wanted[found.version], f"version {found.version}"
