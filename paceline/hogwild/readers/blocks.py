"""Reads text files, plain or gzipped, in blocks of whole lines, and says where a mistake is."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import UsageError

BLOCK = 32 << 20  # bytes of text at a time
_SHOWN = 24  # bytes of what was found


class TextFile:
    """Iterate over the blocks of a file; ``lines`` counts the lines of the blocks that were taken."""

    def __init__(self, path: Path, *, block: int = BLOCK) -> None:
        self.path, self.lines = path, 0
        self._block, self._size = b"", block

    def __iter__(self) -> Iterator[bytes]:
        try:
            with self.path.open("rb") as plain:
                packed = plain.read(2) == b"\x1f\x8b"
            with gzip.open(self.path, "rb") if packed else self.path.open("rb") as file:
                yield from self._whole_lines(lambda: file.read(self._size))
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UsageError(f"{self.path}: cannot be read: {error}; is it complete?") from error
        except IsADirectoryError as error:
            raise UsageError(f"{self.path}: wanted a file, found a directory") from error
        except OSError as error:
            raise UsageError(f"{self.path}: cannot be read: {error.strerror or error}") from error

    def take(self, result: Mapping[str, Any]) -> Mapping[str, Any]:
        """Take what the compiled reader made of the present block; raise if it found a mistake."""
        if "offset" in result:
            raise self._mistake(result["offset"], result["wanted"])
        self.lines += result["lines"]
        return result

    def line(self, offset: int) -> int:
        """The number of the line, from 1, at this place of the present block; call it before ``take``."""
        return self.lines + self._block.count(b"\n", 0, offset) + 1

    def _whole_lines(self, read: Any) -> Iterator[bytes]:
        rest = b""
        while part := read():
            whole, newline, after = part.rpartition(b"\n")
            if not newline:
                rest += part
                continue
            self._block = rest + whole + newline
            rest = after
            yield self._block
        if rest:
            self._block = rest
            yield self._block

    def _mistake(self, offset: int, wanted: str) -> UsageError:
        column = offset - (self._block.rfind(b"\n", 0, offset) + 1) + 1
        place = f"{self.path}: line {self.line(offset)}, column {column}"
        return UsageError(f"{place}: wanted {wanted}, found {_found(self._block, offset)}")


def _found(block: bytes, offset: int) -> str:
    words = block[offset : offset + _SHOWN].partition(b"\n")[0].split()
    if not words or block[offset : offset + 1].isspace():
        return "a blank" if words else "the end of the line"
    return repr(words[0])[1:]  # bytes that are no text are escaped
