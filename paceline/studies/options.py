"""Makes the command-line options of a study from the fields of its dataclass."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any, Union, get_args, get_origin, get_type_hints

import click

from paceline.studies.study import Study

_WORDS = {int: "INTEGER", float: "FLOAT", str: "TEXT"}


def command_options(study: type[Study]) -> list[click.Option]:
    """Make one ``click`` option for every field of a study, with its type, default and help."""
    hints = get_type_hints(study)
    return [_option(field, hints[field.name]) for field in dataclasses.fields(study)]


def _option(field: dataclasses.Field[Any], hint: Any) -> click.Option:
    flag = field.name.replace("_", "-")
    hint = _without_none(hint)
    settings: dict[str, Any] = {"type": hint}
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        settings = {"type": _comma_separated(item), "metavar": f"{_WORDS[item]},..."}
    return click.Option(
        [f"--{flag}/--no-{flag}" if hint is bool else f"--{flag}", field.name],
        default=field.default,
        show_default=field.default is not None,  # the help says what None stands for
        help=field.metadata["help"],
        **settings,
    )


def _without_none(hint: Any) -> Any:
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    (choice,) = (choice for choice in get_args(hint) if choice is not types.NoneType)
    return choice


def _comma_separated(item: type) -> Callable[[Any], tuple[Any, ...]]:
    """Make the function that reads values separated by commas, as in ``net1,net2``, into a tuple.

    Commas inside brackets are part of a value: ``sync,ada-sync(k0=2, window=5)`` are two values.
    """

    def read(value: Any) -> tuple[Any, ...]:
        if isinstance(value, tuple):  # a default
            return value
        pieces = [piece.strip() for piece in split_outside_brackets(str(value))]
        try:
            return tuple(item(piece) for piece in pieces if piece)
        except ValueError as error:
            raise ValueError(f"{value!r} is not {_WORDS[item]},... separated by commas.") from error

    return read


def split_outside_brackets(text: str) -> list[str]:
    """Split at the commas outside brackets.

    >>> split_outside_brackets("sync,ada-sync(k0=2, window=5)")
    ['sync', 'ada-sync(k0=2, window=5)']
    """
    pieces, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth <= 0:
            pieces.append("")
        else:
            pieces[-1] += character
    return pieces
