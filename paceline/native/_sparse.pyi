from collections.abc import Callable, Sequence
from typing import final

MAX_THREADS: int

@final
class Problem:
    def prepare(self, parameters: Sequence[int], /) -> None: ...
    def run(
        self,
        parameters: Sequence[int],
        scheme: int,
        threads: int,
        batch: int,
        watch: int,
        rate: float,
        epoch: int,
        delay: float,
        order: int,
        start: int,
        end: int,
        outcome: int,
        stop: Callable[[], bool] | None,
        /,
    ) -> None: ...
    def judge(self, parameters: Sequence[int], threads: int, /) -> tuple[float, float]: ...
    def describe(self, budget: int, /) -> tuple[int, int, int, bool]: ...

def linear(
    doubles: bool,
    wide: bool,
    wide_starts: bool,
    rows: int,
    columns: int,
    entries: int,
    starts: int,
    indices: int,
    values: int,
    targets: int,
    weights: int,
    loss: int,
    regulariser: float,
    intercept: bool,
    /,
) -> Problem: ...
def completion(
    doubles: bool,
    wide: bool,
    entries: int,
    rows: int,
    columns: int,
    rank: int,
    row: int,
    column: int,
    values: int,
    regulariser: float,
    /,
) -> Problem: ...
def cut(
    doubles: bool,
    wide: bool,
    edges: int,
    nodes: int,
    ways: int,
    tail: int,
    head: int,
    weights: int,
    fixed: int,
    /,
) -> Problem: ...
def shuffle(order: int, count: int, seed: int, /) -> None: ...
