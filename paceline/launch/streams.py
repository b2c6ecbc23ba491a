"""Passing on what workers print, line by line with the rank in front."""

from __future__ import annotations

import codecs
import os
import select
import sys
import threading
from typing import IO, Literal

_CHUNK = 1 << 16


class Screen:
    """Our own standard output and error, written by one thread at a time."""

    def __init__(self) -> None:
        self._writing = threading.Lock()

    def write(self, name: Literal["stdout", "stderr"], text: str) -> None:
        """Write text to one of the two, with ``?`` for what its encoding does not have."""
        with self._writing:
            stream = sys.stdout if name == "stdout" else sys.stderr
            encoding = stream.encoding or "utf-8"
            stream.write(text.encode(encoding, "replace").decode(encoding))
            stream.flush()


class Copier(threading.Thread):
    """A thread that copies a worker's pipe to the screen until the pipe is closed.

    With a prefix, whole lines are written at a time; without, all that comes. After ``finish`` it copies what is in
    the pipe and ends, even if some process that escaped still holds the other end.
    """

    def __init__(self, pipe: IO[bytes], screen: Screen, name: Literal["stdout", "stderr"], *, prefix: str) -> None:
        super().__init__(name=f"paceline-{name}", daemon=True)
        self._pipe = pipe
        self._screen = screen
        self._target = name
        self._prefix = prefix
        self._held: list[str] = []  # the beginning of a line whose end has not come yet
        self._finishing = threading.Event()
        self._poll = select.poll()  # select.select refuses descriptors above 1023
        self._poll.register(pipe, select.POLLIN)

    def finish(self) -> None:
        """Copy what is left and end; ``join`` waits for that."""
        self._finishing.set()

    def run(self) -> None:
        try:
            with self._pipe:
                self._copy()
        except OSError:
            # Nobody reads our output any more. With the pipe closed, the worker's next print raises, as it would
            # without a supervisor.
            return

    def _copy(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while chunk := self._next_chunk():
            self._pass_on(decoder.decode(chunk))
        self._pass_on(decoder.decode(b"", final=True))
        if self._held:
            self._pass_on("\n")

    def _next_chunk(self) -> bytes:
        """Wait for bytes; none at the end of the pipe, or when finishing and there are no more."""
        while True:
            finishing = self._finishing.is_set()
            if self._poll.poll(0 if finishing else 500):
                return os.read(self._pipe.fileno(), _CHUNK)
            if finishing:
                return b""

    def _pass_on(self, text: str) -> None:
        if not self._prefix:
            self._screen.write(self._target, text)
            return
        lines = text.split("\n")
        if len(lines) > 1:
            lines[0] = "".join([*self._held, lines[0]])
            self._held.clear()
            self._screen.write(self._target, "".join(f"{self._prefix}{line}\n" for line in lines[:-1]))
        if lines[-1]:
            self._held.append(lines[-1])
