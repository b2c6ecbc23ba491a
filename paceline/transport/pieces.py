"""Bytes that lie in several stretches of memory, sent and received as if they lay in one."""

from __future__ import annotations


class Pieces:
    """Stretches of memory, of format "B", one behind the other.

    >>> pieces = Pieces(memoryview(b"gradi"), memoryview(b"ents"))
    >>> pieces.nbytes, len(pieces.stretches)
    (9, 2)
    """

    def __init__(self, *stretches: memoryview) -> None:
        self.stretches = [stretch for stretch in stretches if len(stretch)]
        self.nbytes = sum(map(len, self.stretches))

    def copied(self) -> Pieces:
        """The same bytes elsewhere: where they lie they are going to change."""
        return Pieces(memoryview(b"".join(self.stretches)))


def first(stretches: list[memoryview], count: int) -> list[memoryview]:
    """The stretches of the first so many bytes, or of all if there are fewer."""
    found: list[memoryview] = []
    for stretch in stretches:
        if count == 0:
            break
        found.append(stretch[:count])
        count -= len(found[-1])
    return found


def joined(stretches: list[memoryview]) -> memoryview:
    """The same bytes in one stretch: copied if they lie in several."""
    return stretches[0] if len(stretches) == 1 else memoryview(b"".join(stretches))


def without(stretches: list[memoryview], count: int) -> list[memoryview]:
    """Stretches without the first so many bytes of them."""
    for index, stretch in enumerate(stretches):
        if count < len(stretch):
            return [stretch[count:], *stretches[index + 1 :]]
        count -= len(stretch)
    return []
