from collections.abc import Sequence
from typing import final

MAX_RANKS: int
PAST_CACHE_FROM: int

@final
class Ticket:
    def wait(self, seconds: float, /) -> bool: ...
    def done(self) -> bool: ...
    def source(self) -> int: ...

@final
class Region:
    def address(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Group:
    def collective(
        self,
        kind: int,
        dtype: int,
        reduce: int,
        root: int,
        count: int,
        input: int,
        output: int,
        inputs: Sequence[int] | None,
        outputs: Sequence[int] | None,
        input_sizes: Sequence[int] | None,
        output_sizes: Sequence[int] | None,
        alone: bool,
        /,
    ) -> Ticket | None: ...
    def message(
        self, kind: int, dtype: int, peer: int, tag: int, count: int, address: int, alone: bool, /
    ) -> Ticket | int: ...
    def allocate(self, bytes: int, objection: str, /) -> Region: ...
    def close(self) -> None: ...

def join(
    file: int,
    rank: int,
    size: int,
    cores: int,
    timeout: float,
    name: str,
    life: Sequence[int],
    numbers: Sequence[int],
    /,
) -> Group: ...
def segment_bytes(size: int, /) -> int: ...
def can_reduce(dtype: int, reduce: int, /) -> bool: ...
def examine(address: int, bytes: int, /) -> tuple[bool, int]: ...
def copy_examined(to: int, source: int, bytes: int, /) -> tuple[bool, int]: ...
def copy_past_cache(to: int, source: int, bytes: int, /) -> None: ...
def instruction_set() -> str: ...
def choose_instruction_set(name: str, /) -> bool: ...
