"""Bytes in several stretches of memory, sent and received as if they were in one."""

from __future__ import annotations


class Pieces:
    """Stretches of memory, of format "B", in the order of their bytes; fewer bytes may be received if ``at_most``.

    >>> pieces = Pieces(memoryview(b"gradi"), memoryview(b"ents"))
    >>> pieces.nbytes, len(pieces.stretches)
    (9, 2)
    """

    def __init__(self, *stretches: memoryview, at_most: bool = False) -> None:
        self.stretches = [stretch for stretch in stretches if len(stretch)]
        self.nbytes, self.at_most = sum(map(len, self.stretches)), at_most

    def room_for(self, nbytes: int) -> Pieces | None:
        """Where so many bytes are received, or None if they are too many or too few."""
        if nbytes == self.nbytes:
            return self
        return Pieces(*first(self.stretches, nbytes)) if self.at_most and nbytes < self.nbytes else None

    def copied(self) -> Pieces:
        """Copy the bytes, before their memory changes."""
        return Pieces(memoryview(b"".join(self.stretches)))


def first(stretches: list[memoryview], count: int) -> list[memoryview]:
    """The first ``count`` bytes, or all if there are fewer."""
    found: list[memoryview] = []
    for stretch in stretches:
        if count == 0:
            break
        found.append(stretch[:count])
        count -= len(found[-1])
    return found


def without(stretches: list[memoryview], count: int) -> list[memoryview]:
    """All bytes but the first ``count``."""
    for index, stretch in enumerate(stretches):
        if count < len(stretch):
            return [stretch[count:], *stretches[index + 1 :]]
        count -= len(stretch)
    return []
