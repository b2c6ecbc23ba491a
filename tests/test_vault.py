"""What a killed server leaves behind: a whole version, and none that was acknowledged is lost."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

from paceline.errors import CommError
from paceline.record.fingerprints import hash_of
from paceline.server.gathering import adopt
from paceline.server.layout import ModelLayouts
from paceline.server.memory import HEAD, SharedMemory
from paceline.server.vault import Vault, read_note
from paceline.trainee import Trainee

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
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                if state["count"] > 3 * place:
                    state["mean"] = state.get("mean", torch.zeros_like(parameter)) * 0.9 + parameter.grad
                    parameter.sub_(state["mean"], alpha=0.01 * state["count"])


OPTIMIZERS["replaces"] = Replaces
KEPT = list(OPTIMIZERS)


class Server:
    """A model whose updates are kept in a vault; the gradients of an update depend on its number alone."""

    def __init__(self, file: int, optimizer: str, size: int = 40) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, size), nn.BatchNorm1d(size), nn.Linear(size, 2))
        made = OPTIMIZERS[optimizer](model.parameters())
        self.trainee = Trainee(model=model, optimizers=[made], schedulers=[StepLR(made, 3, 0.9)])
        layouts = ModelLayouts(model)
        memory = SharedMemory(file, down=layouts.down.nbytes, up=layouts.up.nbytes, slots=1, create=True)
        self.vault = Vault(file, self.trainee, memory.down, HEAD)
        found = read_note(file)
        if found is not None:
            self.vault.recover(found)
        adopt(layouts, memory.down, found=found is not None)
        self.version = 0 if found is None else found["version"]
        if found is None:
            self.vault.begin(0, {"mine": 0})
        else:
            assert found["mine"] == self.version

    def commit(self) -> None:
        self.vault.before_update()
        torch.manual_seed(self.version)
        for parameter in self.trainee.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.trainee.update()
        for buffer in self.trainee.model.buffers():
            buffer += 1
        self.version += 1
        self.vault.after_update(self.version, {"mine": self.version})

    def hash(self) -> bytes:
        return hash_of([*self.trainee.model.parameters(), *self.trainee.model.buffers()])


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = os.memfd_create("test")
    yield descriptor
    os.close(descriptor)


def hashes(optimizer: str, count: int) -> list[bytes]:
    """The hash of every version, undisturbed."""
    descriptor = os.memfd_create("test")
    server = Server(descriptor, optimizer)
    found = [server.hash()]
    for _ in range(count):
        server.commit()
        found.append(server.hash())
    os.close(descriptor)
    return found


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
            server.vault.catch_up() if server.version % 2 else None
    assert server.hash() == wanted[12]


@pytest.mark.parametrize("optimizer", KEPT)
def test_an_update_that_was_broken_off_is_undone(file: int, optimizer: str) -> None:
    wanted = hashes(optimizer, 6)
    for version in range(6):
        server = Server(file, optimizer)
        server.vault.before_update()
        for parameter in server.trainee.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        server.trainee.update()
        server = Server(file, optimizer)
        assert (server.version, server.hash()) == (version, wanted[version])
        server.commit()
    assert Server(file, optimizer).hash() == wanted[6]


def test_pushes_that_waited_are_counted(file: int) -> None:
    server = Server(file, "sgd")
    server.commit()
    server.vault.taken(3)
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


def test_a_state_that_cannot_be_kept_is_told_and_does_no_harm(file: int, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(file, "odd")
    for _ in range(3):
        server.commit()
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "from now on a server that is killed goes back to its last checkpoint"
    ]
    with pytest.raises(CommError, match="was not kept"):
        read_note(file)


@pytest.mark.processes
@pytest.mark.parametrize("optimizer", ["momentum", "adam", "replaces"])
def test_killed_at_any_instant_it_loses_nothing_acknowledged(file: int, optimizer: str) -> None:
    """A child commits as fast as it can and acknowledges by a pipe; it is killed again and again."""
    source = random.Random(optimizer)
    wanted = hashes(optimizer, 1)
    for _ in range(25):
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
