"""Parameters of which ``make test`` takes a few, and ``make soak`` the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from paceline import native


def quick(values: Iterable[Any], *chosen: Any) -> list[Any]:
    """All values, for ``parametrize``: ``make test`` runs those that are chosen."""
    values = list(values)
    assert all(value in values for value in chosen), f"{chosen} are to be of {values}"
    return [value if value in chosen else pytest.param(value, marks=pytest.mark.soak) for value in values]


def in_turn(cases: Iterable[Any], ways: Sequence[Any]) -> list[Any]:
    """Every case in every way, for ``parametrize``: ``make test`` runs each case in one way, the ways in turn."""
    return [
        pytest.param(case, way, marks=[] if turn == number % len(ways) else [pytest.mark.soak])
        for number, case in enumerate(cases)
        for turn, way in enumerate(ways)
    ]


# For tests in which a worker waits until a timeout: make test lets them wait over one way of agreeing.
over_one_backend = pytest.mark.parametrize(
    "world", quick(["gloo", "shared memory"], "shared memory" if native.available() else "gloo"), indirect=True
)
