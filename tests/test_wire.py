"""Messages as bytes: every message comes back as it was, and no bytes do worse than raise a WireError."""

from __future__ import annotations

import json
import math
import random
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import WireError
from paceline.transport.messages import (
    KINDS,
    Alive,
    Ask,
    BatchMessage,
    Count,
    Data,
    Described,
    Go,
    Hello,
    Kind,
    Mean,
    Message,
    PushMessage,
    Refused,
    Save,
    Skip,
)
from paceline.transport.wire import MAX_HEAD, decode, encode

_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_COUNTS = st.integers(0, 2**64 - 1)
_FIELDS: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**63 - 1),
    Count: _COUNTS,
    float: st.floats(),
    bool: st.booleans(),
    str: _TEXTS,
    bytes: st.binary(max_size=200),
    tuple[str, ...]: st.lists(_TEXTS, max_size=3).map(tuple),
    tuple[float, ...]: st.lists(st.floats(), max_size=5).map(tuple),
    tuple[Described, ...]: st.lists(
        st.builds(Described, _TEXTS, st.lists(_COUNTS, max_size=4).map(tuple), _TEXTS, st.booleans()), max_size=4
    ).map(tuple),
    Kind: st.sampled_from(["gradient", "difference", "parameters"]),
    get_type_hints(Data)["last"]: st.sampled_from(["short", "drop", "pad"]),
}


def _some(kind: type[Message]) -> st.SearchStrategy[Message]:
    return st.builds(kind, *(_FIELDS[field] for field in get_type_hints(kind, include_extras=True).values()))


MESSAGES = st.one_of([_some(kind) for kind in KINDS.values()])

EXAMPLES: list[Message] = [
    Hello(-1, 0, 77, "host", False, (Described("0.weight", (3, 4), "float32", True),)),
    PushMessage(3, 2, 64, 0.5, 0.01, True, 2**64 - 1, b"\xff\x01"),
    Go(3, 2, True, 0, 17, 4),
    BatchMessage(3, 0, 18),
    Ask(10, 1),
    Mean(0, "loss", 1.0, (0.25, math.inf)),
    Data(1000, 64, "short", True),
    Save("run"),
    Alive(),
]


# Kinds that end in bytes of any length.
RESTS = {kind for kind in KINDS.values() if bytes in list(get_type_hints(kind).values())[-1:]}


def _rest(message: Any) -> int:
    return len(message[-1]) if type(message) in RESTS else 0


def _head(kind: type[Message], body: bytes) -> bytes:
    return encode(Alive())[:3] + bytes([next(number for number, known in KINDS.items() if known is kind)]) + body


@given(message=MESSAGES)
def test_a_message_comes_back_as_it_was(message: Message) -> None:
    read = decode(encode(message))
    assert type(read) is type(message)
    assert repr(read) == repr(message)  # NaN is not equal to itself


@given(message=MESSAGES, data=st.data())
def test_a_message_cut_short_is_refused(message: Message, data: st.DataObject) -> None:
    head = encode(message)
    fixed = len(head) - _rest(message)
    with pytest.raises(WireError):
        decode(head[: data.draw(st.integers(0, fixed - 1))])


@given(message=MESSAGES.filter(lambda message: type(message) not in RESTS))
def test_bytes_after_a_message_are_refused(message: Message) -> None:
    with pytest.raises(WireError):
        decode(encode(message) + b"}")


def mutated(frame: bytes, source: random.Random) -> bytes:
    """Change, cut, repeat or invent bytes."""
    changed = bytearray(frame)
    for _ in range(source.randint(1, 4)):
        place = source.randrange(len(changed) + 1)
        kind = source.randrange(5)
        if kind == 0 and place < len(changed):
            changed[place] ^= 1 << source.randrange(8)
        elif kind == 1:
            del changed[place : place + source.randrange(9)]
        elif kind == 2:
            changed[place:place] = source.randbytes(source.randrange(9))
        elif kind == 3:
            changed[place : place + 8] = source.choice([b"\xff" * 8, bytes(8), b"9" * 8, b'[[[[{{"\\'])
        else:
            changed[place:place] = changed[: source.randrange(40)]
    return bytes(changed)


def test_100_000_mutated_or_random_heads_are_messages_or_refused() -> None:
    source = random.Random(7)
    heads = [encode(message) for message in EXAMPLES]
    refused = 0
    for turn in range(100_000):
        if turn % 10:
            head = mutated(source.choice(heads), source)
        else:
            head = encode(Alive())[: source.randrange(4)] + source.randbytes(source.randrange(80))
        try:
            encode(decode(head))  # what was understood fits into a message again
        except WireError:
            refused += 1
    assert 50_000 < refused < 100_000


BAD_BODIES = [
    (Hello, b"{}", "wanted the fields rank"),
    (Save, b'{"path": "a", "mode": 1}', "wanted the fields path"),
    (Save, b'{"path": "a", "path": "b"}', "twice"),
    (Save, b'{"path": 3}', "Save.path: wanted str, found 3"),
    (Save, b'{"path": "\\ud800"}', "Save.path: wanted str"),
    (Save, b'{"path": "\xff"}', "wanted a JSON object"),
    (Save, b"[" * 60_000, "wanted a JSON object"),
    (
        Data,
        b'{"num_samples":1,"batch_size":1,"last":"all","shuffle":true,"checksum":0}',
        "'short' or 'drop' or 'pad', found 'all'",
    ),
    (
        Data,
        b'{"num_samples":-1,"batch_size":1,"last":"pad","shuffle":true,"checksum":0}',
        "wanted a whole number of 0 or more",
    ),
    (
        Data,
        b'{"num_samples":true,"batch_size":1,"last":"pad","shuffle":true,"checksum":0}',
        "wanted a whole number of 0 or more",
    ),
    (
        Data,
        b'{"num_samples":1.0,"batch_size":1,"last":"pad","shuffle":true,"checksum":0}',
        "wanted a whole number of 0 or more",
    ),
    (Data, b'{"num_samples":' + b"9" * 5000 + b"}", "wanted a JSON object"),
    (Mean, b'{"epoch":0,"key":"a","weight":' + b"9" * 400 + b',"values":[]}', "wanted float"),
    (Mean, b'{"epoch":0,"key":"a","weight":1.0,"values":[[1.0]]}', "Mean.values: wanted float"),
    (Mean, b'{"epoch":0,"key":"a","weight":1.0,"values":{}}', "Mean.values: wanted tuple"),
    (Go, bytes(16) + b"\x02" + bytes(58), "wanted 0 or 1 for a flag, found 2"),
    (Skip, bytes(7), "wanted a body of 16 bytes, found 7"),
    (PushMessage, bytes(48), "wanted a body of at least 49 bytes, found 48"),
]


@pytest.mark.parametrize(("kind", "body", "text"), BAD_BODIES, ids=range(len(BAD_BODIES)))
def test_a_bad_body_is_refused_by_name(kind: type[Message], body: bytes, text: str) -> None:
    with pytest.raises(WireError, match=text) as error:
        decode(_head(kind, body))
    assert kind.__name__ in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("head", "text"),
    [
        (b"", "at least 4 bytes, found 0"),
        (b"PK" + encode(Alive())[2:], "begins with b'PL', found b'PK'"),
        (b"PL\x02" + encode(Alive())[3:], "protocol version 1, found 2"),
        (b"PL\x01\xee{}", "found 238"),
    ],
)
def test_a_bad_prefix_is_refused(head: bytes, text: str) -> None:
    with pytest.raises(WireError, match=text):
        decode(head)


def test_only_a_hello_may_be_long_and_not_without_end() -> None:
    entry = Described("x" * 100, (1, 2), "float32", True)
    hello = Hello(0, 0, 1, "host", True, (entry,) * 5000)
    assert decode(encode(hello)) == hello
    with pytest.raises(WireError, match=f"Hello: wanted at most {MAX_HEAD} bytes"):
        encode(hello._replace(model=(entry,) * 10_000))
    with pytest.raises(WireError, match="Refused: wanted at most 65536 bytes"):
        encode(Refused("x" * 70_000))
    with pytest.raises(WireError, match="Refused: wanted at most 65536 bytes"):
        decode(_head(Refused, json.dumps({"reason": "x" * 70_000}).encode()))


UNFIT: list[Message] = [
    Skip(-1),
    Ask(2**63, 1),
    Save("\udcff"),
    Mean(0, "a", True, ()),
    Data(1, 1, "all", True),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("message", UNFIT, ids=repr)
def test_what_no_message_can_hold_is_not_written(message: Message) -> None:
    with pytest.raises(WireError):
        encode(message)


def test_whole_numbers_are_floats_where_floats_are_wanted() -> None:
    assert decode(encode(Mean(0, "a", 1, (2, 3)))) == Mean(0, "a", 1.0, (2.0, 3.0))
