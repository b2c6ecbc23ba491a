"""Splits the text of a delay: terms added with ``+``, then changes of single workers, separated by spaces.

>>> split_terms("1 + exp(0.5) slow(worker=3, factor=5)")
(['1', 'exp(0.5)'], ['slow(worker=3, factor=5)'])
>>> name_options("exp(0.5)", {"rate": float})
'exp(rate=0.5)'
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_origin

from paceline.errors import UsageError

_QUOTED = r'"(?:[^"\\]|\\.)*"'
_NUMBER = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_CALL = rf'[A-Za-z][\w-]*(?:\s*\((?:[^()"]|{_QUOTED}|\([^()]*\))*\))?'
_TERM = re.compile(rf"(?:{_CALL}|{_NUMBER})(?=[\s+]|\Z)", re.A | re.S)
_JOINT = re.compile(r"\s*\+\s*|\s+")
_PIECE = re.compile(rf'(?:[^,()"]|{_QUOTED}|\([^()]*\))+', re.S)
_NAMED = re.compile(r"([A-Za-z]\w*)\s*=\s*(.*)", re.A | re.S)


def split_terms(text: str) -> tuple[list[str], list[str]]:
    """Split into the terms of the sum and the changes after it, each still text."""
    sums, changes = [], []
    term, rest = _take_term(text.strip())
    sums.append(term)
    while rest:
        joint = _JOINT.match(rest)
        assert joint is not None, "a term ends where a joint begins"
        term, rest = _take_term(rest[joint.end() :])
        if "+" not in joint[0]:
            changes.append(term)
        elif changes:
            raise UsageError(f"{term!r} is added after {changes[-1]!r}: write the whole sum first, then the changes.")
        else:
            sums.append(term)
    return sums, changes


def _take_term(text: str) -> tuple[str, str]:
    match = _TERM.match(text)
    if match is None:
        found = repr(text[:40]) if text else "the end"
        hint = " (is a bracket open?)" if text.count("(") > text.count(")") else ""
        raise UsageError(f"wanted a number (not negative, without a unit) or name(value, ...); found {found}{hint}.")
    return match[0], text[match.end() :]


def as_number(term: str) -> float | None:
    """The value of a term that is a plain number, else None."""
    return float(term) if re.fullmatch(_NUMBER, term) else None


def name_options(term: str, fields: Mapping[str, Any]) -> str:
    """Write a call's positional values as named options, in the order of ``fields``.

    If the first field is a tuple it takes all values. Text, such as a file name, needs no quotes.
    """
    name, _, inside = (part.strip() for part in term.partition("("))
    inside = inside.removesuffix(")").strip()
    if re.search(r"^,|,\s*,", re.sub(_QUOTED, "text", inside)):
        raise UsageError(f"a value is missing next to a comma in {term}.")
    values = [value for piece in _PIECE.findall(inside) if (value := piece.strip())]
    first = next(iter(fields))
    if values and get_origin(fields[first]) is tuple and not any(map(_NAMED.fullmatch, values)):
        return f"{name}({first}=({', '.join(values)},))"
    if len(values) > len(fields):
        raise UsageError(f"{name} takes {' and '.join(fields)}, found {len(values)} values.")
    named = (_name_option(value, field, fields) for value, field in zip(values, fields, strict=False))
    return f"{name}({', '.join(named)})"


def _name_option(value: str, field: str, fields: Mapping[str, Any]) -> str:
    match = _NAMED.fullmatch(value)
    if match is not None:
        field, value = match[1], match[2]
    if fields.get(field) is str and not value.startswith('"'):
        value = '"' + value.replace("\\", r"\\") + '"'
    return f"{field}={value}"
