"""Sockets of the server and its workers: ``ipc://@name`` for processes of one host, ``tcp://host:port`` for all."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable

from paceline.errors import CommError, UsageError

_BACKLOG = 1024
# Of an idle connection whose other host has vanished: the first question after so long, then one by one, then the end.
_KEEPALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 2}
_INFO = struct.Struct("<3xB20xI28xI")  # of Linux's tcp_info: probes, unacknowledged segments, ms since the last answer


def connect(address: str, seconds: float) -> socket.socket:
    """Connect to a server; raise ``OSError`` if it is not there, or not within so long."""
    if address.startswith("ipc://"):
        return _of_this_host(lambda connection: connection.connect(_abstract_name(address)))
    return socket.create_connection(_host_and_port(address), timeout=seconds)


def listen(address: str) -> socket.socket:
    """Listen at an address, of which port 0 is any that is free."""
    try:
        door = _listen_here(address) if address.startswith("ipc://") else _listen_to_all(address)
    except (OSError, OverflowError) as error:
        raise CommError(f"the server cannot listen at {address}: {error}; choose another address") from error
    door.setblocking(False)
    return door


def _listen_here(address: str) -> socket.socket:
    door = _of_this_host(lambda door: door.bind(_abstract_name(address)))
    door.listen(_BACKLOG)
    return door


def _of_this_host(use: Callable[[socket.socket], None]) -> socket.socket:
    """A socket for this host alone, connected or bound by ``use``; closed if that fails."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        use(made)
    except OSError:
        made.close()
        raise
    return made


def _listen_to_all(address: str) -> socket.socket:
    host, port = _host_and_port(address)
    host = "0.0.0.0" if host == "*" else host
    family, *_, bound = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    both = family == socket.AF_INET6 and host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server((str(bound[0]), port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)


def address_of(door: socket.socket) -> str:
    """Where a socket listens that is not of this host alone."""
    host, port = door.getsockname()[:2]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def host_of(connection: socket.socket) -> str:
    """The address of the host at the other end, or nothing if it is gone or is this one."""
    with contextlib.suppress(OSError):
        return str(connection.getpeername()[0]) if is_tcp(connection) else ""
    return ""


def is_tcp(connection: socket.socket) -> bool:
    return connection.family != socket.AF_UNIX


def prepare(connection: socket.socket) -> None:
    """Make a new connection ready: it never blocks, small messages go at once, a vanished host is missed."""
    connection.setblocking(False)
    if not is_tcp(connection):
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # on other systems than Linux some are missing
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_CONGESTION") and connection.getsockname()[0] == connection.getpeername()[0]:
        _do_not_pace(connection)


def _do_not_pace(connection: socket.socket) -> None:
    """Inside one host nothing is congested: BBR, the choice of many systems, only loses time there by its pauses."""
    for control in (b"cubic", b"reno"):  # the second is there for everybody
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control)
            return


class Silence:
    """For how long the host at the other end of a connection has left unanswered what this one's kernel sent.

    A process there that does not read is no silence: its kernel answers. So this tells a vanished host from a busy
    worker, which ``TCP_USER_TIMEOUT`` does not. Only Linux says what it takes.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._asks = is_tcp(connection) and hasattr(socket, "TCP_INFO")
        self._looked: float | None = None
        self._since: float | None = None

    def seconds(self, now: float) -> float:
        """Look; who wants to know looks again and again."""
        before, self._looked = self._looked, now
        if not self._asks or before is None:
            return 0.0
        try:
            found = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        except OSError:
            return 0.0
        probes, unanswered, last = _INFO.unpack(found)
        if last / 1000 < now - before or (unanswered == 0 and probes < 2):  # a single probe may be on its way
            self._since = None
            return 0.0
        self._since = self._since or now
        return now - self._since


def _abstract_name(address: str) -> str:
    """The name in the abstract namespace, which leaves nothing in any file system, of ``ipc://@name``."""
    return "\0" + address.removeprefix("ipc://@")


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"cannot connect to {address!r}; wanted an address such as tcp://10.0.0.5:7777")
    return host.strip("[]"), int(port)
