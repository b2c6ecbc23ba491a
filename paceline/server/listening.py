"""The server's ear: sockets, who is connected, whose process has ended; messages in, messages out."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias, cast

import zmq

from paceline.errors import CommError, WireError
from paceline.server.channel import MAX_FRAME, Channel, Sealing
from paceline.server.handshake import HandshakeRefused, answer
from paceline.server.messages import Alive, Message, Push
from paceline.server.wire import decode, encode

logger = logging.getLogger("paceline")

_PROBE_EVERY = 0.5  # seconds between two looks at connections to other hosts
_HEARTBEAT = 300  # milliseconds between ZeroMQ's own signs of life, and ...
_HEARTBEAT_TIMEOUT = 1000  # ... without one for so long a connection is closed


def sealing_to(address: str, *, trusted: bool) -> Sealing:
    """How messages travel to or from an address: what stays on this host needs no sealing."""
    if not address.startswith("tcp://"):
        return "none"
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return _sealing_for(host, trusted)


def _sealing_for(host: str, trusted: bool) -> Sealing:
    if host.startswith("127.") or host in ("::1", "localhost", "::ffff:127.0.0.1"):
        return "none"
    return "heads" if trusted else "all"


class Peer:
    """One authenticated connection; ``tensors`` is where the tensors that it sends go."""

    def __init__(self, socket: zmq.Socket[bytes], route: bytes, channel: Channel, *, remote: bool) -> None:
        self._socket = socket
        self._route = route
        self._channel = channel
        self.remote = remote
        self.tensors: memoryview | None = None
        self.connected = True
        self.received_bytes = self.sent_bytes = 0  # of tensors

    def send(self, message: Message, tensors: memoryview | None = None) -> None:
        """Send a message; that its receiver is gone shows in ``connected``."""
        if not self.connected:
            return
        try:
            self._channel.send(self._socket, encode(message), tensors, route=self._route)
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self.connected = False
        self.sent_bytes += len(tensors) if tensors is not None else 0

    def receive(self, parts: Sequence[zmq.Frame]) -> Message | None:
        """The message that these frames complete, or None if more of its tensors are to come."""
        received = self._channel.receive(parts, self.tensors)
        if received is None:
            return None
        head, has_tensors = received
        message = decode(head)
        if has_tensors != (self.tensors is not None and isinstance(message, Push)):
            found = "found some" if has_tensors else "found none"
            raise WireError(f"wanted tensors with a push from a worker that shares no memory, {found} with {message}")
        if has_tensors and self.tensors is not None:
            self.received_bytes += len(self.tensors)
        return message


class Ended(NamedTuple):
    """A process that was watched has ended, or a connection to another host is lost."""


Heard: TypeAlias = Message | WireError | Ended


class Listener:
    """Listens at addresses; who does not know the token is not heard."""

    def __init__(self, token: bytes, *, trusted: bool = False) -> None:
        self._token, self._trusted = token, trusted
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._sockets: dict[zmq.Socket[bytes], tuple[bool, Sealing | None]] = {}  # for other hosts?  always sealed so?
        self._peers: dict[tuple[zmq.Socket[bytes], bytes], Peer] = {}
        self._processes: dict[int, Peer] = {}  # descriptors of processes
        self._next_probe = 0.0
        self.strangers = 0  # frames of those who do not know the token

    def bind(self, address: str, *, remote: bool, sealing: Sealing | None = None) -> str:
        """Listen at an address, and give it with the port that was found if it had none.

        Without a ``sealing`` each peer gets that of the address it comes from.
        """
        socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        socket.set(zmq.LINGER, 1000)
        socket.set(zmq.ROUTER_MANDATORY, 1)
        socket.set(zmq.SNDHWM, 0)  # a peer has at most one unanswered message with tensors
        socket.set(zmq.MAXMSGSIZE, MAX_FRAME)
        if remote:
            socket.set(zmq.HEARTBEAT_IVL, _HEARTBEAT)
            socket.set(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT)
            socket.set(zmq.IPV6, 1)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise CommError(f"the server cannot listen at {address}: {error}; choose another address") from error
        self._sockets[socket] = remote, sealing
        self._poller.register(socket, zmq.POLLIN)
        return cast(bytes, socket.get(zmq.LAST_ENDPOINT)).decode().rstrip("\0")

    def watch(self, peer: Peer, process: int) -> bool:
        """Tell when this process of ours ends; False if it has ended already."""
        try:
            descriptor = os.pidfd_open(process)
        except ProcessLookupError:
            return False
        except (OSError, OverflowError) as error:
            raise WireError(f"wanted the process of a worker, found number {process}: {error}") from error
        self._unwatch_all(peer)
        self._processes[descriptor] = peer
        self._poller.register(descriptor, zmq.POLLIN)
        return True

    def forget(self, peer: Peer) -> None:
        """Hear no more of a peer."""
        self._peers = {key: known for key, known in self._peers.items() if known is not peer}
        self._unwatch_all(peer)

    def hear(self, seconds: float) -> Iterator[tuple[Peer, Heard]]:
        """Wait for something to happen, and give all that has happened."""
        for source, _ in self._poller.poll(round(seconds * 1000)):
            if isinstance(source, zmq.Socket):
                yield from self._receive(source)
            elif source in self._processes:
                peer = self._processes[source]
                self._unwatch(source)
                yield peer, Ended()
        yield from self._probe()

    def close(self) -> None:
        """Send what is still to be sent, and be gone."""
        for descriptor in list(self._processes):
            self._unwatch(descriptor)
        for socket in self._sockets:
            socket.close()
        self._context.term()

    def _receive(self, socket: zmq.Socket[bytes]) -> Iterator[tuple[Peer, Heard]]:
        for _ in range(64):  # and not without end: there is more to listen to
            try:
                route, *parts = socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            peer = self._peers.get((socket, route.bytes))
            if peer is None:
                self._meet(socket, route.bytes, parts)
                continue
            try:
                message = peer.receive(parts)
            except WireError as error:
                yield peer, error
                continue
            if message is not None:
                yield peer, message

    def _meet(self, socket: zmq.Socket[bytes], route: bytes, parts: Sequence[zmq.Frame]) -> None:
        remote, fixed = self._sockets[socket]
        try:
            if len(parts) != 1:
                raise WireError(f"wanted a handshake of 1 frame, found {len(parts)}")
            sealing = fixed or (_sealing_for(str(parts[0].get("Peer-Address")), self._trusted) if remote else "none")
            channel, reply = answer(parts[0].bytes, self._token, sealing)
        except WireError as error:
            self.strangers += 1
            if isinstance(error, HandshakeRefused):
                with contextlib.suppress(zmq.ZMQError):  # it may be gone
                    socket.send_multipart([route, error.reply])
            if self.strangers.bit_count() == 1:  # the first, second, fourth, ...: nobody fills a disk with this
                logger.warning("refused a stranger (%d so far): %s", self.strangers, error)
            return
        try:
            socket.send_multipart([route, reply])
        except zmq.ZMQError:  # gone again
            return
        self._peers[socket, route] = Peer(socket, route, channel, remote=remote)

    def _probe(self) -> Iterator[tuple[Peer, Heard]]:
        now = time.monotonic()
        if now < self._next_probe:
            return
        self._next_probe = now + _PROBE_EVERY
        for peer in [peer for peer in self._peers.values() if peer.remote]:
            peer.send(Alive())
            if not peer.connected:
                yield peer, Ended()

    def _unwatch_all(self, peer: Peer) -> None:
        for descriptor in [number for number, known in self._processes.items() if known is peer]:
            self._unwatch(descriptor)

    def _unwatch(self, descriptor: int) -> None:
        del self._processes[descriptor]
        self._poller.unregister(descriptor)
        os.close(descriptor)
