"""Traces: what is written is read again, and damage to the file does not go unnoticed."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.record import trace as traced
from paceline.record.trace import (
    MAGIC,
    Committed,
    Given,
    Joined,
    Pushed,
    Record,
    Trace,
    TraceError,
    TracePosition,
    TraceWriter,
)

ABOUT = {"torch": "1.2.3", "threads": 1, "command": ["script.py", "--fast"]}
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "H": st.integers(0, 2**16 - 1),
    "I": st.integers(0, 2**32 - 1),
    "Q": st.integers(0, 2**64 - 1),
    "q": st.integers(-(2**63), 2**63 - 1),
    "d": st.floats(allow_nan=False),
    "?": st.booleans(),
    "s": st.binary(min_size=16, max_size=16),
}


def records_of(kind: type[Record], form: struct.Struct) -> st.SearchStrategy[Record]:
    letters = form.format.lstrip("<").replace("16s", "s")
    return st.tuples(*(VALUES[letter] for letter in letters)).map(lambda values: kind(*values))


RECORDS = st.one_of([records_of(kind, form) for kind, form in traced._FORMATS.values()])
BLOCKS = st.lists(st.lists(RECORDS, min_size=1, max_size=6), min_size=3, max_size=6)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file for all examples."""
    return tmp_path_factory.mktemp("trace") / "trace.bin"


def write(file: Path, blocks: Sequence[Sequence[Record]]) -> list[TracePosition]:
    """Write records, flushed after each block; tells how far the file was after the description and after each."""
    writer = TraceWriter(file, ABOUT)
    places = [writer.position]
    for block in blocks:
        for record in block:
            writer.append(record)
        places.append(writer.flush())
    writer.close()
    return places


def flat(blocks: Sequence[Sequence[Record]]) -> list[Record]:
    return [record for block in blocks for record in block]


def test_every_kind_of_record_has_a_number_and_a_format() -> None:
    assert {kind for kind, _ in traced._FORMATS.values()} == set(get_args(Record))
    for kind, form in traced._FORMATS.values():
        assert len(form.unpack(bytes(form.size))) == len(kind._fields)


@given(BLOCKS)
def test_what_is_written_is_read(file: Path, blocks: list[list[Record]]) -> None:
    write(file, blocks)
    trace = Trace(file)
    assert trace.about == ABOUT
    assert list(trace) == list(trace) == flat(blocks)
    assert [type(record) for record in trace] == [type(record) for record in flat(blocks)]


def test_much_at_once_is_flushed_by_itself(file: Path) -> None:
    writer = TraceWriter(file, ABOUT)
    records = [Joined(rank, 0, 0.5) for rank in range(10_000)]
    for record in records:
        writer.append(record)
    assert writer.position.length > 100_000
    writer.close()
    assert list(Trace(file)) == records


@given(BLOCKS, st.data())
def test_any_changed_byte_is_an_error_that_names_the_block(
    file: Path, blocks: list[list[Record]], data: st.DataObject
) -> None:
    ends = [len(MAGIC), *(place.length for place in write(file, blocks))]
    content = bytearray(file.read_bytes())
    changed = data.draw(st.integers(0, len(content) - 1))
    content[changed] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content)
    if changed < len(MAGIC):
        wanted = "is not a trace"
    else:
        block = max(number for number, end in enumerate(ends) if end <= changed)
        wanted = f"block {block}, which begins at byte {ends[block]}, does not match its checksum"
    with pytest.raises(TraceError, match=wanted):
        Trace(file)


@given(BLOCKS, st.data())
def test_two_blocks_that_have_changed_places_are_an_error(
    file: Path, blocks: list[list[Record]], data: st.DataObject
) -> None:
    ends = [place.length for place in write(file, blocks)]
    content = file.read_bytes()
    parts = [content[start:end] for start, end in itertools.pairwise(ends)]
    first, second = sorted(data.draw(st.permutations(range(len(parts))))[:2])
    parts[first], parts[second] = parts[second], parts[first]
    file.write_bytes(content[: ends[0]] + b"".join(parts))
    with pytest.raises(TraceError, match=f"block {first + 1}, which begins at byte {ends[first]}"):
        Trace(file)


@given(BLOCKS, st.data())
def test_a_trace_cut_off_is_the_whole_blocks_before_the_cut(
    file: Path, blocks: list[list[Record]], data: st.DataObject
) -> None:
    ends = [place.length for place in write(file, blocks)]
    content = file.read_bytes()
    cut = data.draw(st.integers(0, len(content) - 1))
    file.write_bytes(content[:cut])
    if cut < ends[0]:
        with pytest.raises(TraceError):
            Trace(file)
    else:
        whole = sum(end <= cut for end in ends) - 1
        assert list(Trace(file)) == flat(blocks[:whole])


@given(BLOCKS, st.data())
def test_bytes_missing_in_the_middle_are_an_error_or_leave_a_true_beginning(
    file: Path, blocks: list[list[Record]], data: st.DataObject
) -> None:
    """If no whole block is left behind the gap, it looks like a cut at the end, and the records before it are good."""
    ends = [len(MAGIC), *(place.length for place in write(file, blocks))]
    content = file.read_bytes()
    start = data.draw(st.integers(len(MAGIC), len(content) - 2))
    stop = data.draw(st.integers(start + 1, len(content) - 1))
    left = content[:start] + content[stop:]
    # What follows the gap may begin with the bytes that are missing.
    changed = next((place for place, byte in enumerate(left) if byte != content[place]), len(left))
    block = max(number for number, end in enumerate(ends) if end <= changed)
    assume(block > 0)
    file.write_bytes(left)
    try:
        found = list(Trace(file))
    except TraceError as error:
        assert f"block {block}, which begins at byte {ends[block]}" in str(error)
    else:
        assert found == flat(blocks[: block - 1])
        missing = stop - start
        assert len(content) - ends[block] - missing < ends[block + 1] - ends[block], "a whole block was passed over"


def test_a_gap_between_whole_blocks_is_an_error(file: Path) -> None:
    blocks = [[Joined(rank, 0, 0.0)] for rank in range(5)]
    ends = [place.length for place in write(file, blocks)]
    content = file.read_bytes()
    file.write_bytes(content[: ends[1]] + content[ends[2] :])
    with pytest.raises(TraceError, match=f"block 2, which begins at byte {ends[1]}"):
        Trace(file)


@given(BLOCKS, st.data())
def test_going_on_after_a_place_equals_writing_at_once(
    file: Path, blocks: list[list[Record]], data: st.DataObject
) -> None:
    """What was written behind the place is cut off, as when a run goes back to its last checkpoint."""
    places = write(file, blocks)
    whole = file.read_bytes()
    number = data.draw(st.integers(0, len(blocks)))
    write(file, [*blocks[:number], *data.draw(BLOCKS)])
    writer = TraceWriter(file, {"about": "another"}, after=places[number])
    for block in blocks[number:]:
        for record in block:
            writer.append(record)
        writer.flush()
    writer.close()
    assert file.read_bytes() == whole


def test_a_place_that_the_file_does_not_reach_begins_it_anew(file: Path) -> None:
    place = write(file, [[Joined(0, 0, 0.0)]])[-1]
    file.write_bytes(file.read_bytes()[:-1])
    TraceWriter(file, ABOUT, after=place).close()
    assert list(Trace(file)) == []


def test_the_last_good_version_is_told(file: Path) -> None:
    ends = write(file, [[Committed(1, 1, 0.0)], [Committed(2, 1, 0.0)], [Committed(3, 1, 0.0)]])
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(TraceError, match=rf"byte {ends[2].length}, .* up to the commit of version 2, is good"):
        Trace(file)


def test_a_record_of_no_known_kind_is_an_error(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(traced._PACKERS, Joined, (b"\xc8", traced._PACKERS[Joined][1]))
    write(file, [[Joined(0, 0, 0.0)]])
    with pytest.raises(TraceError, match=r"block 1, .* holds a record of the unknown kind 200"):
        Trace(file)


def test_an_event_takes_less_than_64_bytes(file: Path) -> None:
    """As in a run whose every push is a commit, and a block."""
    (begin, *_, end) = write(
        file,
        [
            [
                Given(0, step, step, True, 0, step),
                Pushed(0, step, step, 32, 0.5, 2**63, 1.0),
                Committed(step + 1, 1, 1.0),
            ]
            for step in range(100)
        ],
    )
    assert (end.length - begin.length) / 300 < 64
    assert max(form.size for _, form in traced._FORMATS.values()) + 1 < 64


def test_no_file_and_another_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot read the trace .*nothing.bin: No such file"):
        Trace(tmp_path / "nothing.bin")
    (tmp_path / "other.bin").write_bytes(b"something else")
    with pytest.raises(TraceError, match=r"is not a trace: it begins with b'somethin'"):
        Trace(tmp_path / "other.bin")
