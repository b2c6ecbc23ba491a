"""What the server refuses: it says why, by name, and goes on serving the others as if nothing had been."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from led_by_hand import Hand, batches
from live import TOKEN, Cluster, Weights
from test_connections import in_line
from torch import nn
from torch.optim import SparseAdam

from paceline.errors import CommError, UsageError, WireError
from paceline.policies import Sync
from paceline.server.client import Client
from paceline.sessions.checks import check_for_server
from paceline.train_state import TrainState
from paceline.transport.calling import call
from paceline.transport.handshake import Opening
from paceline.transport.messages import (
    Ask,
    Averaged,
    BatchMessage,
    Data,
    Finished,
    Go,
    Mean,
    Message,
    PushMessage,
    Record,
    Refused,
    Save,
    Saved,
    Unknown,
    Warned,
    Welcome,
)

HUGE = 2**64 - 1


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A server under async with one good worker, number 1, which still is served at the end."""
    with Cluster("async", workers=2) as cluster:
        good = Hand(cluster, 1)
        good.ask()
        yield cluster
        before = cluster.value
        good.push(1.0)
        assert good.go().version == cluster.host.commits[-1].version
        assert cluster.value == before - 1.0
        assert 1 in cluster.server._members


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def refusal_of(hand: Hand, message: Message, tensors: bytes | None = None) -> str:
    hand.say(message, tensors)
    return hand.hear(Refused).reason


def test_a_wrong_token(cluster: Cluster) -> None:
    with pytest.raises(WireError, match="the token is not the server's"):
        Hand(cluster, token=bytes(32))
    assert cluster.listener.strangers == 1


@pytest.mark.parametrize("sealed", [False, True])
def test_a_wrong_token_and_disagreement_on_encryption_are_told_to_a_worker(cluster: Cluster, sealed: bool) -> None:
    address = cluster.listener.bind("tcp://127.0.0.1:0", sealed=sealed)
    options: dict[str, Any] = {"address": address, "rank": 0, "incarnation": 0, "memory": None}
    with pytest.raises(WireError, match=rf"joining the server at {address}: .*the token is not the server's; give"):
        Client(Weights(), token=bytes(32), sealed=sealed, **options)
    with pytest.raises(WireError, match=rf"joining the server at {address}: .*--trusted-network is for both or"):
        Client(Weights(), token=TOKEN, sealed=not sealed, **options)
    assert cluster.listener.strangers == 2
    hand = Hand(cluster, 0, address=address, sealed=sealed)
    hand.ask()
    hand.push(2.0)
    assert hand.go().version == 1
    assert hand.value == cluster.value == -2.0


@pytest.mark.parametrize("sealed", [False, True])
def test_something_that_is_no_server_is_told_of_by_its_address(sealed: bool) -> None:
    """It may be another service, or one in between that does not have the token."""
    hello = Opening(TOKEN, sealed=sealed).hello()
    for words in (b"HTTP/1.1 400 Bad Request\r\n\r\n", in_line(bytes(48)), in_line(hello)):
        with socket.create_server(("127.0.0.1", 0)) as door:
            answering = threading.Thread(target=answer_once, args=(door, words))
            answering.start()
            address = f"tcp://127.0.0.1:{door.getsockname()[1]}"
            with pytest.raises(WireError, match=f"joining the server at {address}: (wanted a head|the server did not)"):
                call(address, TOKEN, sealed=sealed, seconds=30)
            answering.join()


def answer_once(door: socket.socket, words: bytes) -> None:
    with door.accept()[0] as connection:
        connection.recv(100)
        connection.sendall(words)
        connection.recv(100)  # until the other end closes


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Weights(4), r"tensor 0 is \('weights.0', \(4,\), 'float32', True\), and \('weights.0', \(3,\), "),
        (Weights(3).double(), r"tensor 0 is \('weights.0', \(3,\), 'float64', True\)"),
        (Weights(3).requires_grad_(False), r"tensor 0 is \('weights.0', \(3,\), 'float32', False\)"),
        (Weights(3, 1), "it has 2 tensors, and 1 here"),
        (nn.Linear(3, 1), r"tensor 0 is \('weight', "),
    ],
)  # fmt: skip
def test_another_model(cluster: Cluster, model: nn.Module, reason: str) -> None:
    with pytest.raises(CommError, match=f"the server refused worker 0: another model than the server's: {reason}"):
        cluster.client(model, 0)


def test_a_model_whose_names_fill_a_message(cluster: Cluster) -> None:
    hand = Hand(cluster, hello=False)
    hello = hand.hello(0)
    assert "another model" in refusal_of(hand, hello._replace(model=(hello.model[0]._replace(name="x" * 1_000_000),)))


def test_tensors_of_another_length(cluster: Cluster) -> None:
    hand = Hand(cluster, 0)
    go = hand.ask()
    push = PushMessage(go.step, go.version, 1, 0.0, 0.0, False, 0, b"\1")
    assert "wanted 64 bytes of tensors, found 32" in refusal_of(hand, push, bytes(32))
    assert cluster.value == 0.0


def test_a_push_without_tensors(cluster: Cluster) -> None:
    """What was pushed before is not taken for it."""
    hand = Hand(cluster, 0)
    go = hand.ask()
    hand.push(2.0)
    go = hand.go()
    assert "tensors" in refusal_of(hand, PushMessage(go.step, go.version, 1, 0.0, 0.0, False, 0, b"\1"))
    assert cluster.value == -2.0


def test_a_version_that_is_not_yet(cluster: Cluster) -> None:
    hand = Hand(cluster, 0)
    hand.ask()
    hand.push(2.0, version=1)
    assert hand.hear(Refused).reason == "a push on version 1, and the newest is 0"
    assert cluster.value == 0.0


@pytest.mark.parametrize("used", [b"", b"\1\0"])
def test_bits_for_other_parameters(cluster: Cluster, used: bytes) -> None:
    hand = Hand(cluster, 0)
    hand.ask()
    hand.push(2.0, used=used)
    assert "parameters, of 1" in hand.hear(Refused).reason


@pytest.mark.parametrize("examples", [HUGE, 2**63, 2**62])
def test_more_examples_than_there_can_be(cluster: Cluster, examples: int) -> None:
    """They would outweigh everybody else's, or make infinite what is finite."""
    hand = Hand(cluster, 0)
    hand.ask()
    hand.push(2.0, examples=examples)
    assert "examples" in hand.hear(Refused).reason
    assert cluster.value == 0.0


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite(number: float) -> None:
    """They are left out; their batch counts as used, and the worker goes on."""
    with Cluster("sync", workers=2) as cluster:
        bad, good = Hand(cluster, 0), Hand(cluster, 1)
        assert batches(bad, good) == [0, 1]
        bad.push(number)
        assert bad.hear(Warned).reason == "step 0 of worker 0: the gradient of weights.0 is not finite; it is left out"
        assert bad.go().batch == 2
        bad.push(3.0)
        good.push(1.0)
        assert (bad.go().batch, good.go().batch, cluster.value) == (3, 4, -2.0)
        assert cluster.server.figures()[0]["refused"] == 1


def test_numbers_whose_sum_alone_is_not_finite(cluster: Cluster) -> None:
    hand = Hand(cluster, 0)
    hand.ask()
    hand.push(3e38)
    assert hand.go().version == 1
    hand.push(-3e38)
    hand.go()


@pytest.mark.parametrize(
    "message",
    [
        Welcome(0, 1, 0, 0, 0, 0, 0),
        Go(0, 0, True, 0, 0, 0),
        BatchMessage(0, 0, 0),
        Finished(0, 0),
        Averaged("key", (1.0,)),
        Saved("path"),
        Warned("reason"),
        Unknown(),
        Refused("reason"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_only_a_server_may_say(cluster: Cluster, message: Message) -> None:
    hand = Hand(cluster, 0)
    assert refusal_of(hand, message) == f"wanted a message of a worker, found {type(message).__name__}"
    hand.say(Ask(-1, 1))
    hand.hear(Unknown)


def test_batches_of_nothing(cluster: Cluster) -> None:
    assert "nobody has said what the data is" in refusal_of(Hand(cluster, 0), Ask(1, 1))


@pytest.mark.parametrize("size", [0, HUGE])
def test_data_that_cannot_be(cluster: Cluster, size: int) -> None:
    assert "batch" in refusal_of(Hand(cluster, 0), Data(6, size, "short", True))
    assert not cluster.queue.described


def test_other_data_than_the_first(cluster: Cluster) -> None:
    hand = Hand(cluster, 0)
    hand.say(Data(6, 2, "short", True))
    assert "first it was 6 samples shuffled in batches of 2" in refusal_of(hand, Data(6, 3, "short", True))


def test_means_of_different_lengths(cluster: Cluster) -> None:
    first, second = Hand(cluster, 0), Hand(cluster, 2)
    first.say(Mean(0, "key", 1.0, (1.0, 2.0)))
    cluster.until(lambda: bool(cluster.server._averages))
    assert "wanted 2 values for the mean 'key', found 1" in refusal_of(second, Mean(0, "key", 1.0, (1.0,)))


def test_a_mean_that_would_not_fit_into_a_message(cluster: Cluster) -> None:
    """The values do, as 1 or 2; their mean has more digits."""
    assert "wanted at most 2000 values for a mean" in refusal_of(Hand(cluster, 0), Mean(0, "key", 1.0, (1.0,) * 16_000))


@pytest.mark.parametrize("values", ["[]", "nothing", '{"a":', "[" * 10_000])
def test_records_that_are_none(cluster: Cluster, values: str) -> None:
    assert "wanted the values of 'event' as" in refusal_of(Hand(cluster, 0), Record("event", values))


@pytest.mark.parametrize("process", [HUGE, 2**31, 0])
def test_processes_that_cannot_be(cluster: Cluster, process: int) -> None:
    hand = Hand(cluster, hello=False)
    assert "process" in refusal_of(hand, hand.hello(0)._replace(pid=process))


def test_joining_twice_on_one_connection(cluster: Cluster) -> None:
    hand = Hand(cluster, 0)
    assert "joined already" in refusal_of(hand, hand.hello(2))
    cluster.until(lambda: list(cluster.server._members) == [1])


def test_joining_again_and_again_leaves_nothing_open(cluster: Cluster) -> None:
    hand = Hand(cluster, 0)
    before = open_files()
    for _ in range(50):
        refusal_of(hand, Finished(0, 0))
        hand.join(0)
    assert open_files() <= before


def test_a_checkpoint_that_cannot_be_written(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Any) -> None:
        raise ValueError("embedded null byte")

    monkeypatch.setattr(cluster.host, "save", fail)
    assert "null byte" in refusal_of(Hand(cluster, 0), Save("nul\0"))


def test_a_seed_of_64_bits() -> None:
    """As ``torch.seed()`` makes them."""
    with Cluster("async", seed=2**64 - 1) as cluster:
        first, second = Hand(cluster), Hand(cluster)
        assert first.welcome.seed == second.welcome.seed


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "paceline")


# Sparse gradients -------------------------------------------------------------------------------------------


def test_an_optimizer_of_sparse_gradients_is_refused_when_joining() -> None:
    model = nn.Embedding(5, 2)
    train_state = TrainState(model=model, optimizers=[SparseAdam(model.parameters())])
    with pytest.raises(UsageError, match=r"SparseAdam wants sparse gradients, and under sync .* use another optimizer"):
        check_for_server(train_state, Sync(), None)
