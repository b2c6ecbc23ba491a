"""Sockets of the server and its workers: ``ipc://@name`` on one host, ``tcp://host:port`` on one or between several."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable

from paceline.errors import CommError, UsageError

_BACKLOG = 1024
# Of an idle connection: seconds before the first probe, seconds between probes, unanswered probes before the end.
_KEEPALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 2}
_INFO = struct.Struct("<3xB20xI28xI")  # of Linux's tcp_info: probes, unacknowledged segments, ms since the last ACK


def connect(address: str, seconds: float) -> socket.socket:
    """Connect to a server; raise ``OSError`` if that fails or takes longer than ``seconds``."""
    if address.startswith("ipc://"):
        return _unix_socket(address, socket.socket.connect)
    return socket.create_connection(_host_and_port(address), timeout=seconds)


def listen(address: str) -> socket.socket:
    """Listen at an address; port 0 is any free port."""
    try:
        door = _unix_socket(address, socket.socket.bind) if address.startswith("ipc://") else _tcp_listener(address)
    except (OSError, OverflowError) as error:
        raise CommError(f"the server cannot listen at {address}: {error}; choose another address") from error
    door.listen(_BACKLOG)
    door.setblocking(False)
    return door


def _unix_socket(address: str, use: Callable[[socket.socket, str], None]) -> socket.socket:
    """Make a socket and connect or bind it to a name in the abstract namespace, which is in no file system."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        use(made, "\0" + address.removeprefix("ipc://@"))
    except OSError:
        made.close()
        raise
    return made


def _tcp_listener(address: str) -> socket.socket:
    host, port = _host_and_port(address)
    host = "0.0.0.0" if host == "*" else host
    family, *_, bound = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    both = family == socket.AF_INET6 and host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server((str(bound[0]), port), family=family, dualstack_ipv6=both)


def address_of(door: socket.socket) -> str:
    """The address of a TCP socket that listens."""
    host, port = door.getsockname()[:2]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def host_of(connection: socket.socket) -> str:
    """The IP address of a TCP peer; empty for another kind of peer, or one that has gone."""
    with contextlib.suppress(OSError):
        return str(connection.getpeername()[0]) if is_tcp(connection) else ""
    return ""


def is_tcp(connection: socket.socket) -> bool:
    return connection.family != socket.AF_UNIX


def prepare(connection: socket.socket) -> None:
    """Set the options of a new connection: never block, send small messages at once, notice a vanished host.

    Close it and raise ``OSError`` if that fails: the peer has gone.
    """
    connection.setblocking(False)
    if not is_tcp(connection):
        return
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):  # some systems lack some
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if hasattr(socket, "TCP_CONGESTION") and connection.getsockname()[0] == connection.getpeername()[0]:
            _do_not_pace(connection)
    except OSError:
        connection.close()
        raise


def _do_not_pace(connection: socket.socket) -> None:
    """Choose a congestion control without the pauses of BBR, a common default: inside one host they only cost time."""
    for control in (b"cubic", b"reno"):  # every process may choose the second
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control)
            return


class Silence:
    """Measures for how long the peer's host has acknowledged nothing.

    The kernel of a host acknowledges even if its process does not read. So silence means a vanished host, not a busy
    worker; ``TCP_USER_TIMEOUT`` does not distinguish them. It is known on Linux alone; elsewhere it is always 0.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._measures = is_tcp(connection) and hasattr(socket, "TCP_INFO")
        self._looked: float | None = None
        self._since: float | None = None

    def seconds(self, now: float) -> float:
        """The seconds of silence up to ``now``; it has to be called again and again."""
        before, self._looked = self._looked, now
        if not self._measures or before is None:
            return 0.0
        try:
            found = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        except OSError:
            return 0.0
        probes, unanswered, last = _INFO.unpack(found)
        if last / 1000 < now - before or (unanswered == 0 and probes < 2):  # one probe may be under way
            self._since = None
            return 0.0
        self._since = self._since or now
        return now - self._since


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"cannot connect to {address!r}; wanted an address such as tcp://10.0.0.5:7777")
    return host.strip("[]"), int(port)
