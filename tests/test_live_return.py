"""Workers from elsewhere whose connection is lost: they come back, and no batch is lost or used twice."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from led_by_hand import Hand
from ledger import Seen, samples, seen_state, times_used, train
from live import DEADLINE, TOKEN, Cluster, Weights, host_and_port
from torch.optim import SGD

from paceline.policies.messages import PushKind
from paceline.server import live
from paceline.sessions.worker import WorkerSession
from paceline.store.double_buffer import read_note
from paceline.store.layout import ModelLayouts
from paceline.store.memory import Copied, SharedMemory
from paceline.train_state import TrainState
from paceline.transport.listening import Listener
from paceline.transport.messages import Leave

COUNT = 24


class Network:
    """Carries connections to an address until it is cut; new ones can be made at once."""

    def __init__(self, address: str) -> None:
        self._target = host_and_port(address)
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._door.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._door.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                return
            self._ends += [near, far]
            self.connections += 1
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        self._end(source, target)

    def _end(self, *ends: socket.socket) -> None:
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def cut(self) -> bool:
        """Cut all connections; whether there were any."""
        ends, self._ends = self._ends, []
        self._end(*ends)
        return bool(ends)

    def close(self) -> None:
        self._end(self._door)
        self.cut()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster("sync", seen_state(COUNT)) as cluster:
        yield cluster


@pytest.fixture
def network(cluster: Cluster) -> Iterator[Network]:
    network = Network(cluster.tcp_address)
    yield network
    network.close()


def test_a_worker_comes_back_while_it_waits(cluster: Cluster, network: Network) -> None:
    other, own = Hand(cluster, 1, model=Seen(COUNT)), seen_state(COUNT)
    with cluster.session(own, 0, address=network.address) as session:
        other.ask()

        def work() -> list[bool]:
            cancelled = train(session, own.model, [[torch.arange(COUNT)]], epochs=1)
            session.refresh()
            return cancelled

        def cut() -> None:
            cluster.until(lambda: bool(cluster.server._state.pending))
            network.cut()
            cluster.until(lambda: cluster.server._lives[0] == 1)
            other.push(0.0, examples=0)

        assert cluster.together([work, cut])[0] == [False]
        assert session.steps == 1
    assert times_used(cluster) == [1.0] * COUNT, "its push stays"


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_worker_comes_back_after_computing(cluster: Cluster, network: Network, accumulate: bool) -> None:
    """What it has computed is not wanted any more: its batch was given back when it was gone."""
    own = seen_state(COUNT)
    cluster.server.worker_is_gone(1)
    with cluster.session(own, 0, address=network.address) as session:
        given = []
        for number, (places,) in enumerate(session.batches(samples(COUNT), 8, epochs=1, shuffle=False)):
            given.append(int(places[0]))
            with session.step(accumulate=accumulate and number == 0):
                torch.autograd.backward(own.model(places).mean())
                if number == 0:
                    network.cut()
                    cluster.until(lambda: 0 not in cluster.server._members)
        assert given[:2] == [0, 0]
    assert times_used(cluster) == [1.0] * COUNT


BOTH = "cast(both=true)"  # of numbers that lose nothing by it


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("policy", "codec"),
    [
        ("sync", None),
        ("k-sync(k=2)", None),
        ("k-batch-async(k=3)", None),
        ("ssp(bound=1)", None),
        ("downpour(period=3)", None),
        ("gradient-coding(stragglers=1)", None),
        ("easgd(period=3, alpha=0.4, order=round-robin)", None),
        ("draco(faulty=1)", None),
        ("k-sync(k=2)", BOTH),
        ("k-batch-async(k=3)", BOTH),
        ("downpour(period=3)", BOTH),
        ("easgd(period=3, alpha=0.4)", "top-k(density=0.1)"),
    ],
)
def test_connections_that_are_lost_again_and_again(policy: str, codec: str | None) -> None:
    workers, epochs = 3, 6
    begun = threading.Event()  # with the cutting: nobody is done before that
    done = threading.Event()  # of the first: nobody is cut off while leaving, for then the server would not hear of it
    one_at_a_time = threading.Lock()  # a cut, or being done
    all_done = threading.Barrier(workers)  # the server would end when the first has left and the others are cut off

    def before_step() -> None:
        assert begun.wait(DEADLINE)
        time.sleep(0.005)

    def work(session: WorkerSession, own: TrainState) -> None:
        train(session, own.model, samples(COUNT), batch_size=2, epochs=epochs, before_step=before_step)
        with one_at_a_time:
            done.set()
        all_done.wait(DEADLINE)

    with Cluster(policy, seen_state(COUNT), workers=workers, codec=codec) as cluster:
        networks = [Network(cluster.tcp_address) for _ in range(workers)]

        def one(rank: int) -> None:
            own = seen_state(COUNT)
            with cluster.session(own, rank, address=networks[rank].address) as session:
                work(session, own)

        def cut() -> None:
            source = random.Random(3)
            while not done.wait(0.05):
                with one_at_a_time:
                    if not done.is_set() and source.choice(networks).cut():
                        begun.set()

        cutting = threading.Thread(target=cut)
        cutting.start()
        try:
            cluster.together([lambda rank=rank: one(rank) for rank in range(workers)])  # type: ignore[misc]
        finally:
            done.set()
            cutting.join()
        for network in networks:
            network.close()
    if cluster.policy.kind is PushKind.GRADIENT:
        assert times_used(cluster) == [float(epochs)] * COUNT
    elif cluster.policy.kind is PushKind.DIFFERENCE:  # a step takes half of 1 off the parameters of its two samples
        assert (-2 * cast(Seen, cluster.train_state.model).seen).tolist() == [float(epochs)] * COUNT
    else:  # what one that joins again had of its own is gone
        assert cluster.queue.finished(epochs) and cluster.queue.epoch == epochs
    assert sum(network.connections for network in networks) > workers


@pytest.mark.parametrize("has_left", [False, True])
def test_a_replaced_server_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch, has_left: bool) -> None:
    """A worker from elsewhere may have left before the server was killed, or while there was none."""
    monkeypatch.setattr(live, "_LONGEST_ABSENCE", 600.0 if has_left else 0.3)
    with Cluster("async", workers=1) as cluster:
        hand = Hand(cluster, 0)
        if has_left:
            hand.say(Leave(failed=False))
            cluster.wait_for_end()
            cluster.listener.close()
        else:
            cluster.die()
        found = read_note(cluster.memory)
        assert found is not None
        cluster.listener = Listener(TOKEN)
        successor = cluster.make_server(workers=1, version=found["version"], seed=0, patience=0.1, found=found)
        end = time.monotonic() + DEADLINE
        assert successor.serve(lambda: time.monotonic() > end), "it waits until it is stopped"


class Fails(SGD):
    """An optimizer that gives up in the middle of a step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        raise ArithmeticError("in mid-step")


def test_what_a_failed_commit_leaves_is_read_by_nobody() -> None:
    model = Weights()
    layouts = ModelLayouts(model)
    train_state = TrainState(model=model, optimizers=[Fails(model.parameters(), lr=0.1)])
    with pytest.raises(ArithmeticError), Cluster("async", train_state, workers=1) as cluster:
        hand = Hand(cluster, 0)
        hand.ask()
        hand.push(1.0)
        cluster.wait_for_end()
        memory = SharedMemory(cluster.memory, down=layouts.down.nbytes, up=layouts.up.nbytes, slots=1)
        copied = memory.read(0, lambda: None)
    assert copied is Copied.TORN
