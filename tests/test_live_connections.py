"""The server and its connections: it waits for none of them, and a worker outlives the loss of the server."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from led_by_hand import Hand
from ledger import samples, seen_state, times_used, train
from live import DEADLINE, TOKEN, Cluster, Weights, host_and_port, weights_state

from paceline.errors import CommError
from paceline.server import client as client_module
from paceline.server.client import Client
from paceline.server.work_queue import WorkQueue
from paceline.transport import listening
from paceline.transport.connections import Connection
from paceline.transport.listening import Listener, Peer, sealed_to
from paceline.transport.sockets import listen

pytestmark = pytest.mark.timeout(60)

LARGE = 4_000_000  # numbers: more than the buffers of a connection take
COUNT = 24


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def remote(cluster: Cluster, rank: int, address: str | None = None) -> Hand:
    """A worker whose kernel takes little for it: a buffer that grows with its reader may come to hold all."""
    hand = Hand(cluster, rank, model=Weights(LARGE), address=address or cluster.tcp_address)
    hand.line._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
    return hand


@pytest.mark.parametrize("over_tcp", [False, True])
def test_a_worker_that_reads_nothing_keeps_nobody_waiting_and_gets_whole_versions(over_tcp: bool) -> None:
    with Cluster("async", weights_state(LARGE)) as cluster:
        address = cluster.tcp_address if over_tcp else cluster.address
        slow, quick = (remote(cluster, rank, address) for rank in range(2))
        quick.ask()
        slow.ask()
        slow.push(1.0)
        cluster.until(lambda: cluster.value == -1.0)  # and the answer does not fit into the connection
        for version in range(1, 6):
            quick.push(1.0)
            assert quick.go().version == version + 1
        go = slow.go()
        weights = slow.layouts.down.views(slow.parameters)[0]
        assert go.version == 1
        assert torch.all(weights == -1.0), "a later commit shows"


def test_steps_that_are_overtaken_on_their_way_do_not_pile_up() -> None:
    with Cluster("k-sync(k=1)", weights_state(LARGE)) as cluster:
        slow, quick = remote(cluster, 0), remote(cluster, 1)
        slow.ask()
        quick.ask()
        for _ in range(8):
            quick.push(1.0)
            quick.go()
        heard = [slow.go() for _ in range(2)]
        while heard[-1].version < 8:
            heard.append(slow.go())
        weights = slow.layouts.down.views(slow.parameters)[0]
        assert len(heard) < 8
        assert torch.all(weights == -8.0)


def test_who_takes_nothing_for_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with Cluster("async", weights_state(LARGE)) as cluster:
        slow, quick = remote(cluster, 0), remote(cluster, 1)
        slow.ask()
        quick.ask()
        slow.push(1.0)
        with monkeypatch.context() as impatient:
            impatient.setattr(listening, "TIME_TO_TAKE", 0.3)
            cluster.until(lambda: list(cluster.server._members) == [1])
        quick.push(1.0)
        quick.go()


def test_strangers_who_only_hold_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with Cluster("async") as cluster:
        place = host_and_port(cluster.tcp_address)
        first = socket.create_connection(place)
        others = [socket.create_connection(place) for _ in range(listening._MOST_NAMELESS)]
        first.settimeout(DEADLINE)
        assert first.recv(1) == b"", "the oldest makes room"
        Hand(cluster, 0, address=cluster.tcp_address).ask()
        monkeypatch.setattr(listening, "_TIME_TO_PROVE", 0.1)
        others[-1].settimeout(DEADLINE)
        assert others[-1].recv(1) == b"", "nobody waits for a proof for ever"
        for connection in (first, *others):
            connection.close()
        assert cluster.listener.strangers > 0


def test_the_end_of_a_process_is_not_taken_for_that_of_one_watched_since() -> None:
    """A descriptor that is closed while what has happened is gone through may be another's before its turn comes."""
    listener = Listener(TOKEN)
    ends = [Connection(end) for _ in range(2) for end in socket.socketpair()]
    first, second, third, fourth = (Peer(end, listener) for end in ends)
    processes = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    for peer, process in zip((first, second), processes, strict=True):
        assert listener.watch(peer, process.pid)
    for process in processes:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    ended = []
    for peer, _ in listener.hear(DEADLINE):
        ended.append(peer)
        if len(ended) == 1:
            listener.forget(second if peer is first else first)
            assert listener.watch(third, os.getpid()) and listener.watch(fourth, os.getpid())
    listener.close()
    for end in ends:
        end.close()
    for process in processes:
        process.wait()
    assert len(ended) == 1 and ended[0] in (first, second)


@pytest.mark.parametrize("over_tcp", [False, True])
def test_joining_and_leaving_leaves_nothing_open(over_tcp: bool) -> None:
    with Cluster("async", workers=1) as cluster:
        keeper = Hand(cluster, 1)
        address = cluster.tcp_address if over_tcp else cluster.address

        def once() -> None:
            client = cluster.client(Weights(), 0, address=address)
            client.ask(-1)
            client.next_step(-1)
            client.leave(failed=False)
            cluster.until(lambda: list(cluster.server._members) == [1])

        once()
        before = open_files()
        for _ in range(50):
            once()
        assert open_files() <= before
        keeper.close()


def test_a_whole_cluster_leaves_nothing_open() -> None:
    def once() -> None:
        with Cluster("async") as cluster:
            for address in (cluster.address, cluster.tcp_address):
                Hand(cluster, address=address).ask()

    once()
    before = open_files()
    for _ in range(5):
        once()
    assert open_files() <= before


@pytest.mark.parametrize("codec", [None, "cast(both=true)"])  # of numbers that lose nothing by it
@pytest.mark.parametrize("over_tcp", [False, True])
@pytest.mark.parametrize("while_computing", [False, True])
def test_a_server_that_is_killed_and_started_again(over_tcp: bool, while_computing: bool, codec: str | None) -> None:
    """At the same address, with the version, parameters and batches of the first: the worker goes on."""
    own, dead = seen_state(COUNT), threading.Event()
    first = Cluster("async", seen_state(COUNT), workers=1, codec=codec)

    def kill() -> None:
        if not dead.is_set() and len(first.host.commits) >= 3:
            first.die()
            dead.set()

    def work() -> None:
        with first.session(own, 0, address=first.tcp_address if over_tcp else first.address) as session:
            before_step = kill if while_computing else lambda: time.sleep(0.003)
            train(session, own.model, samples(COUNT), batch_size=2, epochs=3, before_step=before_step)

    worker = threading.Thread(target=work, daemon=True)
    with first:
        worker.start()
        while not dead.wait(0.001):
            if not while_computing:
                kill()
        time.sleep(0.05)  # the worker looks for it in vain
        queue, train_state = WorkQueue(), seen_state(COUNT)
        queue.load_state_dict(first.queue.state_dict())
        train_state.model.load_state_dict(first.train_state.model.state_dict())
        version = first.host.commits[-1].version
        options: dict[str, Any] = {"queue": queue, "version": version, "in_place_of": first, "codec": codec}
        with Cluster("async", train_state, workers=1, **options) as second:
            worker.join(DEADLINE)
            assert not worker.is_alive(), "the worker hangs"
            second.wait_for_end()
    assert second.host.commits[-1].version == 3 * COUNT // 2
    used = zip(times_used(first), times_used(second), strict=True)
    assert [before + after for before, after in used] == [3.0] * COUNT


@pytest.mark.parametrize("over_tcp", [False, True])
def test_a_server_that_does_not_come_back(monkeypatch: pytest.MonkeyPatch, over_tcp: bool) -> None:
    monkeypatch.setattr(client_module, "_TIME_TO_RETURN", 0.2)
    with Cluster("async") as cluster:
        client = cluster.client(Weights(), 0, address=cluster.tcp_address if over_tcp else cluster.address)
        client.ask(-1)
        client.next_step(-1)
        cluster.die()
        while not client.cancelled():  # which neither waits nor fails
            time.sleep(0.001)
        assert client.more() is None
        client.push(examples=1, loss=None, seconds=0.0)
        with pytest.raises(CommError, match=r"worker 0: the server at .* is gone; look at its own output"):
            client.next_step(-1)
        client.leave(failed=True)


def test_a_server_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_TIME_TO_ANSWER", 0.2)
    for address in ("ipc://@paceline-test-nobody", "tcp://127.0.0.1:1"):
        with pytest.raises(CommError, match=f"no answer from a server at {address} within"):
            Client(Weights(), address=address, token=TOKEN, sealed=False, rank=0, incarnation=0, memory=None)


def test_an_address_that_is_taken_and_one_that_cannot_be() -> None:
    with listen("tcp://127.0.0.1:0") as taken:
        for address in (f"tcp://127.0.0.1:{taken.getsockname()[1]}", "tcp://192.0.2.1:0"):
            with pytest.raises(CommError, match=f"the server cannot listen at {address}: .*; choose another address"):
                Listener(TOKEN).bind(address)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
@pytest.mark.parametrize("bound", ["tcp://[::1]:0", "tcp://[::]:0", "tcp://*:0"])
def test_addresses_of_both_kinds(bound: str) -> None:
    with Cluster("async") as cluster:
        address = cluster.listener.bind(bound)
        assert address.rpartition(":")[0] == bound.rpartition(":")[0].replace("*", "0.0.0.0")
        port = address.rpartition(":")[2]
        for host in {"[::1]:0": ["[::1]"], "[::]:0": ["[::1]", "127.0.0.1"], "*:0": ["127.0.0.1"]}[bound[6:]]:
            assert not sealed_to(f"tcp://{host}:{port}", trusted=False)
            Hand(cluster, address=f"tcp://{host}:{port}").ask()


@pytest.mark.parametrize(("address", "told"), [("ipc://@nobody {key}", False), ("tcp://127.0.0.1:1", True)])
def test_who_waits_for_a_server_elsewhere_says_so(
    address: str, told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On the server's own host it is not told: a worker may start faster, and the supervisor tells of deaths."""
    monkeypatch.setattr("paceline.server.client._TIME_TO_ANSWER", 0.1)
    address = address.format(key=secrets.token_hex(8))
    with pytest.raises(CommError, match="no answer from a server"):
        Client(Weights(), address=address, token=TOKEN, sealed=False, rank=0, incarnation=0, memory=None)
    assert ("does not answer" in caplog.text) == told
