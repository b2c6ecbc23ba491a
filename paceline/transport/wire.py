"""Messages as bytes and back.

>>> from paceline.transport.messages import Skip
>>> encode(Skip(step=7, version=2)).hex(" ")
'50 4c 01 05 07 00 00 00 00 00 00 00 02 00 00 00 00 00 00 00'
>>> decode(encode(Skip(step=7, version=2)))
Skip(step=7, version=2)

A head is ``PL``, the protocol's version, the message's kind and a body. The body of a frequent message is its fields
one after the other, little endian; that of the others a JSON object with exactly the message's fields. Nothing is
unpickled, and whatever bytes ``decode`` is given, it answers with a message or raises ``WireError``.
"""

from __future__ import annotations

import json
import reprlib
import struct
from typing import Any, Literal, get_args, get_origin, get_type_hints

from paceline.errors import WireError
from paceline.transport.messages import (
    KINDS,
    Ask,
    BatchMessage,
    Choose,
    Compare,
    Count,
    Decided,
    Described,
    Done,
    Examine,
    Give,
    Go,
    Hello,
    Message,
    More,
    Parameters,
    Part,
    PushMessage,
    Ready,
    Skip,
    Take,
    Took,
    Update,
)

MAGIC = b"PL"
PROTOCOL = 1
MAX_HEAD = 2**20  # bytes of any head; only a Hello, which describes the model, may have as many
_MAX_OTHER = 2**16
_PREFIX = struct.Struct("<2sBB")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 60


_NUMBERS = {message: number for number, message in KINDS.items()}


def encode(message: Message) -> bytes:
    """Write a message as the bytes that ``decode`` reads; raise ``WireError`` if a field does not fit."""
    kind = type(message)
    head = _PREFIX.pack(MAGIC, PROTOCOL, _NUMBERS[kind]) + _FORMS[kind].write(message)
    _check_length(kind, head)
    return head


def decode(head: bytes) -> Message:
    """Read the message that ``encode`` wrote; raise ``WireError`` if these bytes are none."""
    if len(head) < _PREFIX.size:
        raise WireError(f"wanted a message of at least {_PREFIX.size} bytes, found {len(head)}")
    magic, protocol, number = _PREFIX.unpack_from(head)
    if magic != MAGIC:
        raise WireError(f"wanted a message that begins with {MAGIC!r}, found {magic!r}")
    if protocol != PROTOCOL:
        raise WireError(f"wanted protocol version {PROTOCOL}, found {protocol}; both hosts need the same Paceline")
    kind = KINDS.get(number)
    if kind is None:
        raise WireError(f"wanted a kind of message out of {', '.join(map(str, KINDS))}, found {number}")
    _check_length(kind, head)
    return _FORMS[kind].read(head[_PREFIX.size :])


def _check_length(kind: type[Message], head: bytes) -> None:
    most = MAX_HEAD if kind is Hello else _MAX_OTHER
    if len(head) > most:
        raise WireError(f"{kind.__name__}: wanted at most {most} bytes, found {len(head)}")


_CODES: dict[Any, str] = {int: "q", Count: "Q", float: "d", bool: "B"}


class _Packed:
    """Fixed fields, and last, if the message has some, bytes of any length."""

    def __init__(self, kind: type[Message]) -> None:
        fields = list(get_type_hints(kind, include_extras=True).values())
        self._kind: Any = kind
        self._has_rest = fields[-1] is bytes
        self._flags = [index for index, field in enumerate(fields) if field is bool]
        self._struct = struct.Struct("<" + "".join(_CODES[field] for field in fields if field is not bytes))

    def write(self, message: Message) -> bytes:
        fields: tuple[Any, ...] = message
        try:
            if self._has_rest:
                return self._struct.pack(*fields[:-1]) + bytes(fields[-1])
            return self._struct.pack(*fields)
        except struct.error as error:
            raise WireError(f"{_SHORT.repr(message)} does not fit into its message: {error}") from None

    def read(self, body: bytes) -> Message:
        size = self._struct.size
        if len(body) < size or (len(body) > size and not self._has_rest):
            least = "at least " if self._has_rest else ""
            raise WireError(f"{self._kind.__name__}: wanted a body of {least}{size} bytes, found {len(body)}")
        fields: list[Any] = list(self._struct.unpack_from(body))
        for index in self._flags:
            if fields[index] > 1:
                raise WireError(f"{self._kind.__name__}: wanted 0 or 1 for a flag, found {fields[index]}")
            fields[index] = bool(fields[index])
        if self._has_rest:
            fields.append(body[size:])
        message: Message = self._kind(*fields)
        return message


class _Text:
    """A JSON object with exactly the message's fields, each of its type."""

    def __init__(self, kind: type[Message]) -> None:
        self._kind: Any = kind
        self._fields = get_type_hints(kind, include_extras=True)

    def write(self, message: Message) -> bytes:
        values = self._checked(message._asdict())
        return json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode()

    def read(self, body: bytes) -> Message:
        try:
            values = json.loads(body.decode(), object_pairs_hook=_object)
        except (ValueError, RecursionError) as error:
            raise WireError(
                f"{self._kind.__name__}: wanted a JSON object, found {_SHORT.repr(body)}: {error}"
            ) from None
        if not isinstance(values, dict) or values.keys() != self._fields.keys():
            wanted = ", ".join(self._fields) or "no fields"
            raise WireError(f"{self._kind.__name__}: wanted the fields {wanted}; found {_SHORT.repr(values)}")
        message: Message = self._kind(**self._checked(values))
        return message

    def _checked(self, values: dict[str, Any]) -> dict[str, Any]:
        name = self._kind.__name__
        return {field: _checked(kind, values[field], f"{name}.{field}") for field, kind in self._fields.items()}


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name is there twice")
    return values


def _checked(kind: Any, value: Any, where: str) -> Any:
    """Give the value as ``kind``, which it must be; sequences may be lists."""
    if get_origin(kind) is tuple and isinstance(value, list | tuple):
        each = get_args(kind)[0]
        return tuple(_checked(each, item, where) for item in value)
    if kind is Described and isinstance(value, list | tuple) and len(value) == len(Described._fields):
        return Described(*(_checked(*pair, where) for pair in zip(_DESCRIBED, value, strict=True)))
    if (
        (kind is int and type(value) is int and -(2**63) <= value < 2**63)
        or (kind is Count and type(value) is int and 0 <= value < 2**64)
        or (kind is bool and type(value) is bool)
        or (kind is str and type(value) is str and _is_unicode(value))
        or (get_origin(kind) is Literal and type(value) is str and value in get_args(kind))
    ):
        return value
    if kind is float and (type(value) is float or (type(value) is int and abs(value) <= 2**53)):
        return float(value)
    raise WireError(f"{where}: wanted {_named(kind)}, found {_SHORT.repr(value)}")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()  # JSON can escape half a surrogate pair, which nothing can print or write to a file afterwards
    except UnicodeEncodeError:
        return False
    return True


def _named(kind: Any) -> str:
    if kind is Count:
        return "a whole number of 0 or more"
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    return kind.__name__ if isinstance(kind, type) and get_origin(kind) is None else str(kind)


_DESCRIBED = list(get_type_hints(Described, include_extras=True).values())
_PACKED: set[type[Message]] = {Ask, PushMessage, Skip, More, Go, BatchMessage}
_PACKED |= {Part, Took, Parameters, Examine, Take, Choose, Compare, Ready, Update, Decided, Give, Done}
_FORMS = {kind: _Packed(kind) if kind in _PACKED else _Text(kind) for kind in KINDS.values()}
