"""The text form ``name(key=value, ...)`` in which policies, optimizers and the like are typed and printed.

>>> parse_call('sgd(lr=1e-3, nesterov=true, title="a b")')
('sgd', {'lr': 0.001, 'nesterov': True, 'title': 'a b'})
>>> print_call("adam", {"betas": (0.9, 0.999), "mode": "ring"})
'adam(betas=(0.9, 0.999), mode=ring)'

A value is a whole number, a number, true or false, a bare word, text in double quotes, a tuple of values, or the text
form of another value, which is its text.

>>> parse_call("async(aggregator=delay-compensated(scale=0.5))")
('async', {'aggregator': 'delay-compensated(scale=0.5)'})
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import reprlib
import types
from collections.abc import Collection, Iterator, Mapping
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from paceline.errors import UsageError, unknown_name

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Value: TypeAlias = int | float | bool | str | tuple["Value", ...]
T = TypeVar("T", bound="DataclassInstance")

MAX_DEPTH = 32  # of nested tuples, so that no text can exhaust the stack

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 160  # characters that errors quote
_TOKEN = re.compile(r'\s*(?:(?P<bare>[\w.+-]+)|(?P<quoted>"(?:[^"\\]|\\.)*"?)|(?P<mark>\S)|\Z)', re.A | re.S)
_WORD = re.compile(r"[A-Za-z][\w.-]*", re.A)
_INT = re.compile(r"[+-]?[0-9]+")
_FLOAT = re.compile(r"[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|inf|nan)", re.I)
_QUOTED = re.compile(r'"(?:[^"\\]|\\["\\])*"')
_RESERVED = ("true", "false", "inf", "nan")  # in upper or lower case; as text they need quotes


def parse_call(text: str) -> tuple[str, dict[str, Value]]:
    """Read ``name`` or ``name(key=value, ...)`` into the name and its options."""
    return _Parser(text).call()


def print_call(name: str, values: Mapping[str, Value]) -> str:
    """Write a name and its options as text; ``parse_call`` reads back the same values and types."""
    for word in (name, *values):
        if not _WORD.fullmatch(word):
            raise UsageError(f"{word!r} cannot be a name: wanted a letter, then letters, digits, _ . or -")
    options = ", ".join(f"{key}={_print_value(value)}" for key, value in values.items())
    return f"{name}({options})" if options else name


def from_spec(kind: str, table: Mapping[str, type[T]], text: str) -> T:
    """Build the dataclass that ``text`` names in ``table``; errors call it a ``kind``, such as "policy"."""
    name, values = parse_call(text)
    if name not in table:
        raise unknown_name(kind, name, table)
    wanted, required = _options_of(table[name])
    return table[name](**fit_options(kind, name, wanted, required, values))


def to_spec(name: str, settings: DataclassInstance) -> str:
    """Write a dataclass as text with only the fields that differ from their defaults."""
    wanted, _ = _options_of(type(settings))
    changed = {}
    # Options without a default come first: those that all of a family have are inherited, and would.
    for field in sorted(dataclasses.fields(settings), key=lambda field: _default_of(field) is not dataclasses.MISSING):
        value = getattr(settings, field.name)
        if field.name in wanted and value != _default_of(field):
            changed[field.name] = _fit(value, wanted[field.name])
    return print_call(name, changed)


def check_types(kind: str, name: str, settings: DataclassInstance) -> None:
    """Raise the UsageError that the text form would have raised for a field of the wrong type."""
    wanted, _ = _options_of(type(settings))
    fit_options(kind, name, wanted, (), {option: getattr(settings, option) for option in wanted})


def fit_options(
    kind: str, name: str, wanted: Mapping[str, Any], required: Collection[str], values: Mapping[str, Value]
) -> dict[str, Value]:
    """Check options against their wanted types and return them, int as float where float is wanted."""
    fitted: dict[str, Value] = {}
    for option, value in values.items():
        if option not in wanted:
            raise _unknown_option(kind, name, option, wanted)
        try:
            fitted[option] = _fit(value, wanted[option])
        except (TypeError, OverflowError):
            raise UsageError(
                f"{kind} {name!r}: {option} wants {_describe(wanted[option])}, got {_SHORT.repr(value)}; "
                f"for example {_example(name, [option], wanted)}"
            ) from None
    missing = [option for option in required if option not in values]
    if missing:
        example = _example(name, required, wanted)
        raise UsageError(f"{kind} {name!r} needs the option {missing[0]}; for example {example}")
    return fitted


class _Token(NamedTuple):
    kind: str  # "bare", "quoted", "end", or the punctuation mark itself
    text: str
    column: int  # from 1


def _tokens(text: str) -> Iterator[_Token]:
    for match in _TOKEN.finditer(text):
        group = match.lastgroup or "end"
        piece = match[group] if match.lastgroup else ""
        yield _Token(piece if group == "mark" else group, piece, match.end() - len(piece) + 1)


class _Parser:
    """Reads one call by recursive descent; ``next`` is the token not yet taken."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.rest = _tokens(text)
        self.next = next(self.rest)

    def call(self) -> tuple[str, dict[str, Value]]:
        name = self.word("a name")
        values = self.options(name) if self.accept("(") else {}
        if self.next.kind != "end":
            raise self.error("the end")
        return name, values

    def options(self, name: str, *, nested: bool = False, depth: int = 0) -> dict[str, Value]:
        values: dict[str, Value] = {}
        while not self.accept(")"):
            start = self.next
            key = self.option_name(name)
            if key in values:
                raise self.error(f"each option once, but {key} was given before", start)
            values[key] = self.value(depth, nested=nested)
            if self.next.kind != ")":
                self.expect(",", ", or )")
        return values

    def option_name(self, name: str) -> str:
        start = self.next
        shown = start.text[:40] if start.kind == "bare" else '"..."'
        example = f"an option as name=value: write the option's name, as in {name}(option={shown})"
        if start.kind == "quoted" or (start.kind == "bare" and not _WORD.fullmatch(start.text)):
            raise self.error(example)
        key = self.word("an option as name=value, or )")
        if self.next.kind in (",", ")"):
            raise self.error(example, start)
        self.expect("=", f"= after the option's name {key}")
        return key

    def value(self, depth: int, *, nested: bool) -> Value:
        start = self.next
        if self.accept("("):
            return self.items(start, depth + 1, nested=nested)
        if start.kind == "quoted" and _QUOTED.fullmatch(start.text):
            self.advance()
            return re.sub(r'\\(["\\])', r"\1", start.text[1:-1])
        if start.kind == "quoted":
            raise self.error(r"text closed by a double quote, with \" and \\ as its only escapes")
        if start.kind != "bare":
            raise self.error("a value: number, true, false, word, text in double quotes or tuple in ( )")
        self.advance()
        value = self.bare(start)
        if isinstance(value, str) and not nested and self.accept("("):
            return print_call(value, self.options(value, nested=True, depth=depth))
        return value

    def items(self, start: _Token, depth: int, *, nested: bool) -> tuple[Value, ...]:
        if depth > MAX_DEPTH:
            raise self.error(f"at most {MAX_DEPTH} tuples inside each other", start)
        values: list[Value] = []
        while not self.accept(")"):
            values.append(self.value(depth, nested=nested))
            if self.next.kind == ")" and len(values) == 1:
                raise self.error("a comma: a tuple of one value is written (value,)")
            if self.next.kind != ")":
                self.expect(",", ", or )")
        return tuple(values)

    def bare(self, token: _Token) -> Value:
        if _INT.fullmatch(token.text):
            try:
                return int(token.text)
            except ValueError:  # Python refuses thousands of digits
                raise self.error("a number of fewer digits", token) from None
        if _FLOAT.fullmatch(token.text):
            return float(token.text)
        if token.text.lower() in ("true", "false"):
            return token.text.lower() == "true"
        if _WORD.fullmatch(token.text):
            return token.text
        raise self.error("a number or a word; put other text in double quotes", token)

    def word(self, wanted: str) -> str:
        token = self.next
        if token.kind != "bare" or not _WORD.fullmatch(token.text):
            raise self.error(wanted)
        self.advance()
        return token.text

    def accept(self, kind: str) -> bool:
        found = self.next.kind == kind
        if found:
            self.advance()
        return found

    def expect(self, kind: str, wanted: str) -> None:
        if not self.accept(kind):
            raise self.error(wanted)

    def advance(self) -> None:
        self.next = next(self.rest)

    def error(self, wanted: str, at: _Token | None = None) -> UsageError:
        token = at or self.next
        found = _SHORT.repr(token.text) if token.text else "the end"
        return UsageError(
            f"cannot read {_SHORT.repr(self.text)}: column {token.column} has {found}, wanted {wanted}. "
            "An example of the form: name(k=3, rate=0.1, mode=ring)"
        )


def _print_value(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        return float.__repr__(value)
    if isinstance(value, tuple):
        items = ", ".join(_print_value(item) for item in value)
        return f"({items},)" if len(value) == 1 else f"({items})"
    if not isinstance(value, str):
        raise TypeError(f"{value!r} has no text form: wanted a number, a bool, a string or a tuple of them")
    if (_WORD.fullmatch(value) and value.lower() not in _RESERVED) or _is_call(value):
        return value
    return '"' + value.replace("\\", r"\\").replace('"', r"\"") + '"'


def _is_call(text: str) -> bool:
    """Whether the text is the text form of something with options, one level deep."""
    if text.count("(") != 1 or not text.endswith(")") or text.partition("(")[0].lower() in _RESERVED:
        return False
    try:
        name, values = parse_call(text)
    except UsageError:
        return False
    return print_call(name, values) == text


@functools.cache  # looking at type hints takes 0.1 ms
def _options_of(settings: type[DataclassInstance]) -> tuple[dict[str, Any], list[str]]:
    """The type of every option of a dataclass, and the names of those without a default."""
    hints = get_type_hints(settings)
    fields = [field for field in dataclasses.fields(settings) if field.init]
    required = [field.name for field in fields if _default_of(field) is dataclasses.MISSING]
    return {field.name: hints[field.name] for field in fields}, required


def _default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _fit(value: Any, wanted: Any) -> Any:
    """Return the value as the wanted type; raise TypeError if it does not fit."""
    origin, arguments = get_origin(wanted), get_args(wanted)
    if wanted is Any or type(value) is wanted:
        return value
    if wanted is float and type(value) is int:
        return float(value)
    if origin is Literal and any(type(value) is type(choice) and value == choice for choice in arguments):
        return value
    if origin in (Union, types.UnionType):
        return _fit_one_of(value, arguments)
    if origin is tuple and type(value) is tuple:
        kinds = arguments[:1] * len(value) if arguments[1:] == (...,) else arguments
        if len(kinds) == len(value):
            return tuple(_fit(item, kind) for item, kind in zip(value, kinds, strict=True))
    raise TypeError(f"{value!r} is not {_describe(wanted)}")


def _fit_one_of(value: Any, choices: tuple[Any, ...]) -> Any:
    if type(value) in choices:  # 1 stays an int where float | int is wanted
        return value
    for choice in choices:
        try:
            return _fit(value, choice)
        except TypeError:
            continue
    raise TypeError(f"{value!r} fits none of {choices}")


_PLAIN: dict[Any, tuple[str, Value]] = {
    int: ("a whole number", 1),
    float: ("a number", 0.5),
    bool: ("true or false", True),
    str: ("text", "text"),
}


def _describe(wanted: Any) -> str:
    """Describe the values that fit, as in "a number or true or false"."""
    arguments = get_args(wanted)
    if get_origin(wanted) is Literal:
        return "one of " + ", ".join(_print_value(choice) for choice in arguments)
    if get_origin(wanted) in (Union, types.UnionType):
        return " or ".join(_describe(choice) for choice in arguments if choice is not types.NoneType)
    if get_origin(wanted) is tuple and arguments[1:] == (...,):
        return f"a tuple, each item {_describe(arguments[0])}"
    if get_origin(wanted) is tuple:
        return f"a tuple of {len(arguments)}: " + ", ".join(_describe(item) for item in arguments)
    return _PLAIN[wanted][0] if wanted in _PLAIN else f"a {wanted.__name__}"


def _example(name: str, options: Collection[str], wanted: Mapping[str, Any]) -> str:
    return print_call(name, {option: _example_value(wanted[option]) for option in options})


def _example_value(wanted: Any) -> Value:
    arguments = get_args(wanted)
    if get_origin(wanted) is tuple:
        return tuple(_example_value(item) for item in arguments if item is not ...)
    if get_origin(wanted) is Literal:
        choice: Value = arguments[0]
        return choice
    if arguments:
        return _example_value(next(choice for choice in arguments if choice is not types.NoneType))
    return _PLAIN.get(wanted, _PLAIN[str])[1]


def _unknown_option(kind: str, name: str, option: str, wanted: Mapping[str, Any]) -> UsageError:
    if not wanted:
        return UsageError(f"{kind} {name!r} has no option {option!r}; it takes none, write {name}")
    nearest = difflib.get_close_matches(option.lower().replace("-", "_"), wanted, n=1, cutoff=0.5)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return UsageError(f"{kind} {name!r} has no option {option!r}.{hint} Options: {', '.join(wanted)}.")
