"""Copies the workers' output to our own, line by line with the rank in front."""

from __future__ import annotations

import codecs
import os
import select
import sys
import threading
from typing import IO, Literal

_CHUNK = 1 << 16


class Output:
    """Our own standard output and error, written by one thread at a time."""

    def __init__(self) -> None:
        self._writing = threading.Lock()

    def write(self, name: Literal["stdout", "stderr"], text: str) -> None:
        """Write text to one of the two, with ``?`` for characters that its encoding lacks."""
        with self._writing:
            stream = sys.stdout if name == "stdout" else sys.stderr
            encoding = stream.encoding or "utf-8"
            stream.write(text.encode(encoding, "replace").decode(encoding))
            stream.flush()


class Copier(threading.Thread):
    """A thread that copies a worker's pipe to our output until the pipe is closed.

    With a prefix it writes whole lines, without one every chunk. After ``finish`` it copies the rest of the pipe and
    ends, even if a process that outlived its worker still holds the other end.
    """

    def __init__(self, pipe: IO[bytes], output: Output, name: Literal["stdout", "stderr"], *, prefix: str) -> None:
        super().__init__(name=f"paceline-{name}", daemon=True)
        self._pipe = pipe
        self._output = output
        self._target = name
        self._prefix = prefix
        self._unfinished: list[str] = []  # the beginning of a line whose end has not come yet
        self._finishing = threading.Event()
        self._poll = select.poll()  # select.select refuses descriptors above 1023
        self._poll.register(pipe, select.POLLIN)

    def finish(self) -> None:
        """Copy the rest and end; ``join`` waits for that."""
        self._finishing.set()

    def run(self) -> None:
        try:
            with self._pipe:
                self._copy()
        except OSError:
            # Our output is closed. With its pipe closed too, the worker's next print raises, as it would without a
            # supervisor.
            return

    def _copy(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while chunk := self._next_chunk():
            self._pass_on(decoder.decode(chunk))
        self._pass_on(decoder.decode(b"", final=True))
        if self._unfinished:
            self._pass_on("\n")

    def _next_chunk(self) -> bytes:
        """Wait for bytes; return none at the end of the pipe, or when finishing and the pipe is empty."""
        while True:
            finishing = self._finishing.is_set()
            if self._poll.poll(0 if finishing else 500):
                return os.read(self._pipe.fileno(), _CHUNK)
            if finishing:
                return b""

    def _pass_on(self, text: str) -> None:
        if not self._prefix:
            self._output.write(self._target, text)
            return
        lines = text.split("\n")
        if len(lines) > 1:
            lines[0] = "".join([*self._unfinished, lines[0]])
            self._unfinished.clear()
            self._output.write(self._target, "".join(f"{self._prefix}{line}\n" for line in lines[:-1]))
        if lines[-1]:
            self._unfinished.append(lines[-1])
