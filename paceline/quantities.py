"""Numbers with a unit, as text: ``10us``, ``25MB``, ``1Gbit/s``.

>>> read_quantity("25 MB", SIZES)
25000000.0
>>> print_quantity(1.25e8, BANDWIDTHS)
'1Gbit/s'
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import TypeAlias

from paceline.errors import UsageError

Units: TypeAlias = Mapping[str, Decimal]

TIMES: Units = {unit: Decimal(size) for unit, size in {"s": "1", "ms": "1e-3", "us": "1e-6", "ns": "1e-9"}.items()}
SIZES: Units = {
    unit: Decimal(size)
    for unit, size in {
        "TB": "1e12", "GB": "1e9", "MB": "1e6", "kB": "1e3", "B": "1",
        "TiB": str(2**40), "GiB": str(2**30), "MiB": str(2**20), "KiB": str(2**10),
    }.items()
}  # fmt: skip
BANDWIDTHS: Units = {
    "Gbit/s": Decimal("125e6"),
    "Mbit/s": Decimal("125e3"),
    "kbit/s": Decimal("125"),
    "bit/s": Decimal("0.125"),
    **{f"{unit}/s": size for unit, size in SIZES.items()},
}

_QUANTITY = re.compile(
    r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*([^\s,0-9]*)(?:\s*,\s*|\s+|\Z)", re.A
)


def read_quantity(text: str, units: Units) -> float:
    """Read one number with one of ``units``, as a number of the unit whose size is 1."""
    return read_quantities(text, {"": units})[""]


def read_quantities(text: str, kinds: Mapping[str, Units]) -> dict[str, float]:
    """Read numbers with units, blanks or commas between, into the kinds that their units tell; each at most once."""
    found: dict[str, float] = {}
    rest = text.strip()
    while rest or not found:
        match = _QUANTITY.match(rest)
        if match is None:
            raise UsageError(f"wanted a number with a unit, found {rest[:40]!r}")
        number, unit, rest = match[1], match[2].replace("µ", "u").replace("μ", "u"), rest[match.end() :]
        kind = next((kind for kind, units in kinds.items() if unit in units), None)
        if kind is None:
            raise _unknown_unit(number, unit, kinds)
        if kind in found:
            raise UsageError(f"{kind or 'the quantity'} is given twice, the second time as {number}{unit}")
        try:
            found[kind] = float(Decimal(number) * kinds[kind][unit])
        except ArithmeticError:
            found[kind] = math.inf
        if math.isinf(found[kind]):
            raise UsageError(f"wanted a number that a float can hold, found {number[:40]}{unit}")
    return found


def print_quantity(value: float, units: Units) -> str:
    """Write a number in the unit in which it is shortest, exactly: ``read_quantity`` reads back the same."""
    numbers = {unit: _plain(Decimal(repr(float(value))) / size) for unit, size in units.items()}
    exact = [unit for unit, number in numbers.items() if read_quantity(number + unit, units) == value]
    unit = min(exact, key=lambda unit: ("e" in numbers[unit], len(numbers[unit] + unit)))
    return numbers[unit] + unit


def _plain(number: Decimal) -> str:
    """Write without an exponent where that is short: 10 rather than 1E+1."""
    number = number.normalize()
    return f"{number:f}" if -6 <= number.adjusted() <= 6 else str(number).lower()


def _unknown_unit(number: str, unit: str, kinds: Mapping[str, Units]) -> UsageError:
    known = "; ".join(" ".join(units) for units in kinds.values())
    if not unit:
        return UsageError(f"{number} has no unit; known are {known}")
    # Mb/s, mbps and MBps are each read as bits by some and as bytes by others.
    hint = "; write bit for bits and B for bytes" if re.match(r"(?i)[kmgt]?i?b", unit) else ""
    return UsageError(f"{number}{unit} has an unknown unit{hint}; known are {known}")
