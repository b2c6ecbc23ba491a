"""Connect to a server as one who knows the token."""

from __future__ import annotations

import time

from paceline.errors import CommError, WireError
from paceline.server.channel import Sealing
from paceline.server.handshake import Opening
from paceline.server.lines import Line
from paceline.server.sockets import connect

_PAUSE = 0.02  # seconds between two attempts
_TIME_TO_CONNECT = 2.0  # of one attempt


def call(address: str, token: bytes, sealing: Sealing, *, seconds: float) -> Line:
    """Connect and prove the token; raise ``CommError`` if there is no server within so long."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            line = Line(connect(address, _TIME_TO_CONNECT))
        except OSError:
            if time.monotonic() > deadline:
                raise CommError(f"no server answers at {address} within {seconds:.0f} s; is it running?") from None
            time.sleep(_PAUSE)
            continue
        opening = Opening(token, sealing)
        line.send(opening.hello())
        while (answer := line.receive()) is None:
            if line.ended or time.monotonic() > deadline:
                line.close()
                raise CommError(f"the server at {address} does not answer")
            line.wait(_PAUSE)
        try:
            line.channel = opening.finish(answer.head)
        except WireError:
            line.close()
            raise
        return line
