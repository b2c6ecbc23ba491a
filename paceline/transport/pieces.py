"""Bytes that lie in several stretches of memory, sent and received as if they lay in one."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate


class Pieces:
    """Stretches of memory, of format "B", one behind the other.

    >>> pieces = Pieces(memoryview(b"gradi"), memoryview(b"ents"))
    >>> pieces.nbytes, [bytes(part) for part in pieces.between(3, 7)]
    (9, [b'di', b'en'])
    """

    def __init__(self, *stretches: memoryview) -> None:
        self._stretches = [stretch for stretch in stretches if len(stretch)]
        self._ends = list(accumulate(map(len, self._stretches)))
        self.nbytes = self._ends[-1] if self._ends else 0
        self._first = 0  # bytes before it are not kept any more

    def between(self, start: int, stop: int) -> list[memoryview]:
        """The parts that hold the bytes from ``start`` up to ``stop``."""
        parts, start, stop = [], start - self._first, stop - self._first
        index = bisect_right(self._ends, start)
        while start < stop:
            stretch, end = self._stretches[index], self._ends[index]
            begin = end - len(stretch)
            parts.append(stretch[start - begin : stop - begin])
            start, index = end, index + 1
        return parts

    def keep(self, start: int) -> None:
        """Copy the bytes from ``start`` on: where they lie they are going to change."""
        rest = memoryview(b"".join(self.between(start, self.nbytes)))
        self._first, self._stretches, self._ends = start, [rest], [len(rest)]
