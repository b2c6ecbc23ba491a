"""Connects to a server and proves the join token."""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.errors import CommError, WireError
from paceline.transport.connections import Connection
from paceline.transport.handshake import Opening

_PAUSE = 0.02  # seconds between two attempts
_TIME_TO_CONNECT = 2.0  # seconds of one attempt


def call(address: str, token: bytes, *, sealed: bool, seconds: float) -> Connection:
    """Connect and prove the token; raise ``CommError`` if no server answers within ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            connection = Connection.to(address, _TIME_TO_CONNECT)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise CommError(f"no server answers at {address} within {seconds:.0f} s; is it running?") from None
            time.sleep(_PAUSE)

    def wait() -> None:
        if connection.ended or time.monotonic() > deadline:
            raise CommError("it does not answer")
        connection.wait(_PAUSE)

    try:
        prove(connection, token, sealed=sealed, wait=wait)
    except (CommError, WireError) as error:
        connection.close()
        raise type(error)(f"joining the server at {address}: {error}") from None
    return connection


def prove(connection: Connection, token: bytes, *, sealed: bool, wait: Callable[[], None]) -> None:
    """Make the handshake on a new connection; ``wait`` waits until something may have come, or raises."""
    opening = Opening(token, sealed=sealed)
    connection.send(opening.hello())
    while (reply := connection.receive()) is None:
        wait()
    proof, ciphers = opening.finish(reply.head)
    connection.send(proof)
    connection.open(ciphers)
