"""Connect to a server as one who knows the token."""

from __future__ import annotations

import time

from paceline.errors import CommError, WireError
from paceline.transport.channel import Sealing
from paceline.transport.connections import Connection
from paceline.transport.handshake import Opening
from paceline.transport.sockets import connect

_PAUSE = 0.02  # seconds between two attempts
_TIME_TO_CONNECT = 2.0  # of one attempt


def call(address: str, token: bytes, sealing: Sealing, *, seconds: float) -> Connection:
    """Connect and prove the token; raise ``CommError`` if there is no server within so long."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            connection = Connection(connect(address, _TIME_TO_CONNECT))
        except OSError:
            if time.monotonic() > deadline:
                raise CommError(f"no server answers at {address} within {seconds:.0f} s; is it running?") from None
            time.sleep(_PAUSE)
            continue
        opening = Opening(token, sealing)
        connection.send(opening.hello())
        while (answer := connection.receive()) is None:
            if connection.ended or time.monotonic() > deadline:
                connection.close()
                raise CommError(f"the server at {address} does not answer")
            connection.wait(_PAUSE)
        try:
            connection.channel = opening.finish(answer.head)
        except WireError:
            connection.close()
            raise
        return connection
