"""Readers of sparse problems: what was written is read, on any number of threads; mistakes have a line and a column."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.hogwild.readers import read_dimacs, read_libsvm, read_ratings
from paceline.hogwild.readers.compiled import parsers

pytest.importorskip("paceline.native._readers", exc_type=ImportError)

Row = tuple[float, list[tuple[int, float]]]

numbers = st.floats(allow_nan=False, allow_infinity=False)
indices = st.integers(0, 2**31 - 2)
rows = st.lists(st.tuples(numbers, st.lists(st.tuples(indices, numbers), max_size=5)), min_size=1, max_size=12)
blanks = st.sampled_from([" ", "  ", "\t", " \t "])
line_ends = st.sampled_from(["\n", " \n", "\r\n", " # a comment: 1:2\n", "\n\n# 3 4:5\n"])
ways = st.fixed_dictionaries(
    {"threads": st.integers(1, 5), "block": st.integers(1, 200), "packed": st.booleans(), "cached": st.booleans()}
)


def written(folder: Path, content: str | bytes, *, packed: bool = False, name: str = "text") -> Path:
    file = folder / name
    data = content.encode() if isinstance(content, str) else content
    file.write_bytes(gzip.compress(data) if packed else data)
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    return lambda: tmp_path_factory.mktemp("texts")


def read_by(reader: Callable[..., Any], way: dict[str, Any], folder: Path, text: str | bytes, **options: Any) -> Any:
    """Read a text in blocks, by threads, packed, through a cache, or not."""
    if reader is not read_dimacs:
        options |= {"threads": way["threads"], "cache": folder / "cache" if way["cached"] else None}
    return reader(written(folder, text, packed=way["packed"]), block=way["block"], **options)


@given(rows=rows, blank=blanks, ends=st.lists(line_ends, min_size=12, max_size=12), way=ways)
def test_libsvm_rows_are_read_as_they_were_written(
    rows: list[Row], blank: str, ends: list[str], way: dict[str, Any], folder: Callable[[], Path]
) -> None:
    lines = [blank.join([repr(target), *(f"{i}:{v!r}" for i, v in entries)]) for target, entries in rows]
    text = "".join(line + end for line, end in zip(lines, ends, strict=False))
    read = read_by(read_libsvm, way, folder(), text, wide=True)
    assert read.targets.tolist() == [target for target, _ in rows]
    assert np.diff(read.indptr).tolist() == [len(entries) for _, entries in rows]
    assert read.indices.tolist() == [index for _, entries in rows for index, _ in entries]
    assert read.values.tolist() == [value for _, entries in rows for _, value in entries]
    assert read.columns == max((i for _, entries in rows for i, _ in entries), default=-1) + 1
    assert (read.indptr.dtype, read.indices.dtype, read.values.dtype) == (np.int64, np.int32, np.float64)


@given(
    entries=st.lists(st.tuples(indices, indices, numbers), min_size=1, max_size=12),
    between=st.sampled_from([" ", "\t", ",", "::", " , ", " :: "]),
    after=st.sampled_from(["", "{0}881250949", "{0}2005-09-06"]),
    way=ways,
)
def test_ratings_are_read_as_they_were_written(
    entries: list[tuple[int, int, float]], between: str, after: str, way: dict[str, Any], folder: Callable[[], Path]
) -> None:
    lines = [f"{u}{between}{i}{between}{v!r}{after.format(between)}\n" for u, i, v in entries]
    read = read_by(read_ratings, way, folder(), "".join(lines), wide=True)
    assert list(zip(read.users.tolist(), read.items.tolist(), read.values.tolist(), strict=True)) == entries
    assert read.shape == (max(u for u, _, _ in entries) + 1, max(i for _, i, _ in entries) + 1)


@given(
    movies=st.lists(st.tuples(indices, st.lists(st.tuples(indices, st.integers(1, 5)), max_size=4)), min_size=1),
    way=ways,
)
def test_netflix_movies_are_read_wherever_the_text_is_cut(
    movies: list[tuple[int, list[tuple[int, int]]]], way: dict[str, Any], folder: Callable[[], Path]
) -> None:
    entries = [(user, movie, float(rating)) for movie, ratings in movies for user, rating in ratings]
    text = "".join(f"{movie}:\n" + "".join(f"{u},{r},2005-09-06\n" for u, r in ratings) for movie, ratings in movies)
    if not entries:
        with pytest.raises(UsageError, match="holds no ratings"):
            read_by(read_ratings, way, folder(), text)
        return
    read = read_by(read_ratings, way, folder(), text)
    assert list(zip(read.users.tolist(), read.items.tolist(), read.values.tolist(), strict=True)) == entries


def test_a_directory_of_movies_is_one_problem(tmp_path: Path) -> None:
    written(tmp_path, "1:\n10,3,2005-09-06\n", name="mv_0000001.txt")
    written(tmp_path, "2:\n10,4,2005-09-06\n11,5,2005-09-06\n", name="mv_0000002.txt")
    read = read_ratings(tmp_path)
    assert (read.users.tolist(), read.items.tolist(), read.values.tolist()) == ([10, 10, 11], [1, 2, 2], [3, 4, 5])


def test_a_line_of_names_is_passed_over(tmp_path: Path) -> None:
    read = read_ratings(written(tmp_path, "userId,movieId,rating,timestamp\n1,2,3.5,9\n"))
    assert (read.users.tolist(), read.values.tolist()) == ([1], [3.5])


@given(
    text=st.one_of(
        st.text("0123456789:.,+-e #qidnmaxpstc\t\r\n", max_size=80).map(str.encode),
        st.binary(max_size=60),
        st.lists(st.sampled_from(["1 2:3", "qid:4", ":", "4 5 6", "p max 3 1", "n 1 s", "a 1 2 3", "nan", "1e999"]))
        .map("\n".join)
        .map(str.encode),
    ),
    reader=st.sampled_from([read_libsvm, read_ratings, read_dimacs]),
    way=ways,
)
def test_whatever_the_text_is_a_reader_reads_it_or_says_where_it_is_wrong(
    text: bytes, reader: Callable[..., Any], way: dict[str, Any], folder: Callable[[], Path]
) -> None:
    try:
        read_by(reader, way, folder(), text)
    except UsageError as error:
        if " wanted " not in str(error) or "line p" in str(error) or "a line n" in str(error):
            return  # of the whole file
        found = re.search(r"text: line (\d+), column (\d+): wanted .+, found .+", str(error))
        if found is None:  # a gzip magic that is no gzip
            assert "cannot be read" in str(error)
            return
        lines = text.split(b"\n")
        assert int(found[1]) <= len(lines)
        assert int(found[2]) <= len(lines[int(found[1]) - 1]) + 1


LIBSVM_MISTAKES = {
    "a target that is no number": ("1 2:3\nyes 1:2\n", 2, 1, "a number as the target of the row, found 'yes'"),
    "targets of several labels": ("1,2 1:2\n", 1, 2, "a blank after the target, found ',2'"),
    "an index alone": ("1 2:3 4\n", 1, 8, "a colon after the index, found the end of the line"),
    "a negative index": ("1 -2:3\n", 1, 3, "an index from 0 to 2147483646"),
    "an index too large": ("1 2147483647:3\n", 1, 3, "an index from 0 to 2147483646"),
    "a value that is missing": ("1 2: 3:4\n", 1, 5, "a number as the value, found a blank"),
    "a value that is no number": ("# 1\n\n1 2:x\n", 3, 5, "a number as the value, found 'x'"),
    "a value with a tail": ("1 2:3x\n", 1, 6, "a blank after the value, found 'x'"),
    "nan": ("1 2:nan\n", 1, 5, "a finite number"),
    "infinity": ("1 2:1e400\n", 1, 5, "a finite number"),
    "too large for float32": ("1 2:1e39\n", 1, 5, "a finite number that fits"),
    "two signs": ("1 2:+-1\n", 1, 5, "a number as the value"),
    "a query that is no number": ("1 qid:x 2:3\n", 1, 7, "a number after qid:"),
}


@pytest.mark.parametrize("case", LIBSVM_MISTAKES)
@pytest.mark.parametrize("block", [3, 1000])
def test_a_mistake_in_libsvm_text_has_its_line_and_column(case: str, block: int, tmp_path: Path) -> None:
    text, line, column, wanted = LIBSVM_MISTAKES[case]
    with pytest.raises(UsageError, match=re.escape(f"text: line {line}, column {column}: wanted {wanted}")):
        read_libsvm(written(tmp_path, text), block=block)


RATINGS_MISTAKES = {
    "two fields": ("1 2\n", 1, 4, "a blank, a comma or :: between the fields, found the end of the line"),
    "one colon": ("1:2:3\n", 1, 2, "a blank, a comma or :: between the fields"),
    "a name": ("1 2 3\nbob 2 3\n", 2, 1, "a number of a user or item"),
    "an item too large": ("1 9999999999 3\n", 1, 3, "the number of an item"),
    "a rating that is no number": ("1,2,x\n", 1, 5, "a number as the rating"),
    "a name below a line of names": ("user,item,rating\n1,2,3\n1,bob,3\n", 3, 3, "the number of an item"),
    "fields under a line of names": ('"user", "item", "rating"\n\n1,2\n', 3, 4, "a blank, a comma or :: between"),
    "a heading below": ("1 2 3\n7:\n", 2, 2, "a blank, a comma or :: between the fields"),
}


@pytest.mark.parametrize("case", RATINGS_MISTAKES)
def test_a_mistake_in_ratings_has_its_line_and_column(case: str, tmp_path: Path) -> None:
    text, line, column, wanted = RATINGS_MISTAKES[case]
    with pytest.raises(UsageError, match=re.escape(f"text: line {line}, column {column}: wanted {wanted}")):
        read_ratings(written(tmp_path, text))


NETWORK = "c a comment\np max 4 3\nn 1 s\nn 4 t\na 1 2 5\na 2 3 2.5\na 3 4 6\n"

DIMACS_MISTAKES = {
    "another problem": (NETWORK.replace("max", "min"), "line 2, column 3: wanted max"),
    "an arc before the problem": ("a 1 2 3\n", "line 1, column 1: wanted the line p max"),
    "two problems": (NETWORK + "p max 4 3\n", "line 8, column 1: wanted one line p alone"),
    "a node that is not there": (NETWORK.replace("a 2 3", "a 2 5"), "line 6, column 5: wanted a node"),
    "node 0": (NETWORK.replace("a 2 3", "a 0 3"), "line 6, column 3: wanted a node"),
    "a negative capacity": (NETWORK.replace("2.5", "-2.5"), "line 6, column 7: wanted a capacity of at least 0"),
    "a word too many": (NETWORK.replace("2.5", "2.5 x"), "line 6, column 11: wanted the end of the line, found 'x'"),
    "another line": (NETWORK + "x\n", "line 8, column 1: wanted a line that begins with c, p, n or a"),
    "two sources": (NETWORK + "n 2 s\n", "line 8, column 5: wanted one source and one sink"),
    "no sink": (NETWORK.replace("n 4 t\n", ""), "names the sink, found none"),
    "source and sink at once": (NETWORK.replace("n 4 t", "n 1 t"), "node 1 is both"),
    "an arc too few": (NETWORK.replace("a 3 4 6\n", ""), "promises 3 arcs, found 2"),
    "nothing": ("", "wanted a line p max"),
}


@pytest.mark.parametrize("case", DIMACS_MISTAKES)
@pytest.mark.parametrize("block", [8, 1000])
def test_a_mistake_in_a_network_is_named(case: str, block: int, tmp_path: Path) -> None:
    text, message = DIMACS_MISTAKES[case]
    with pytest.raises(UsageError, match=re.escape(message)):
        read_dimacs(written(tmp_path, text), block=block)


def test_a_network_is_read(tmp_path: Path) -> None:
    read = read_dimacs(written(tmp_path, NETWORK, packed=True))
    assert (read.nodes, read.source, read.sink) == (4, 0, 3)
    assert (read.tails.tolist(), read.heads.tolist(), read.capacities.tolist()) == ([0, 1, 2], [1, 2, 3], [5, 2.5, 6])


def test_unsorted_and_repeated_indices_are_told(tmp_path: Path) -> None:
    text = "1 1:1 2:1\n1 3:1 2:1\n1 2:1 2:1\n1 5:1 4:1 5:1\n"
    unsorted, repeated = read_libsvm(written(tmp_path, text), block=12, cache=tmp_path).notes
    assert "2 rows (first: line 2) have unsorted indices" in unsorted
    assert "2 rows (first: line 3) have an index twice" in repeated
    assert read_libsvm(tmp_path / "text", cache=tmp_path).notes == (unsorted, repeated)  # of the cache too


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="text: holds no rows"):
        read_libsvm(written(tmp_path, "# nothing\n\n"))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for reader in (read_libsvm, read_ratings, read_dimacs):
        with pytest.raises(UsageError, match="nowhere: cannot be read"):
            reader(tmp_path / "nowhere")


def test_a_packed_file_that_is_cut_short_is_told(tmp_path: Path) -> None:
    file = tmp_path / "text.gz"
    file.write_bytes(gzip.compress(b"1 2:3\n" * 1000)[:-12])
    with pytest.raises(UsageError, match="is it complete"):
        read_libsvm(file)


def test_a_cache_is_used_until_the_text_changes(tmp_path: Path) -> None:
    file, cache = written(tmp_path, "1 2:3\n"), tmp_path / "cache"
    first = read_libsvm(file, cache=cache)
    assert isinstance(first.values, np.memmap)
    about = cache / "text.paceline" / "about.json"
    made = about.stat().st_mtime_ns
    read_libsvm(file, cache=cache)
    assert about.stat().st_mtime_ns == made
    assert read_libsvm(file, cache=cache, wide=True).values.dtype == np.float64  # another kind is no cache of this one
    file.write_text("1 2:4\n")
    os.utime(file, ns=(1, 1))
    assert read_libsvm(file, cache=cache).values.tolist() == [4]
    assert [entry.name for entry in cache.iterdir()] == ["text.paceline"]


def test_readers_that_make_a_cache_at_once_all_succeed(tmp_path: Path) -> None:
    file = written(tmp_path, "1 2:3\n" * 100)
    with ThreadPoolExecutor(4) as pool:
        for repetition in range(10):
            for each in pool.map(lambda _: read_libsvm(file, cache=tmp_path), range(4)):
                assert len(each.values) == 100
            os.utime(file, ns=(repetition, repetition))  # the cache that is there is old
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["text", "text.paceline"]


def test_the_cache_of_who_was_first_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, about = written(tmp_path, "1 2:3\n"), tmp_path / "text.paceline" / "about.json"
    parse, made = parsers().libsvm, []

    def while_another_reads(*arguments: Any) -> Any:
        monkeypatch.undo()
        read_libsvm(file, cache=tmp_path)
        made.append(about.stat().st_ino)
        return parse(*arguments)

    monkeypatch.setattr(parsers(), "libsvm", while_another_reads)
    assert read_libsvm(file, cache=tmp_path).values.tolist() == [3]
    assert [about.stat().st_ino] == made


def without_key(key: str) -> Callable[[bytes], bytes]:
    def changed(about: bytes) -> bytes:
        content = json.loads(about)
        content.get("facts", {}).pop(key, None)
        content.pop(key, None)
        return json.dumps(content).encode()

    return changed


DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "a short array": ("values.npy", lambda content: content[:-10]),
    "a short header": ("values.npy", lambda content: content[:40]),
    "an empty array": ("values.npy", lambda content: b""),
    "an array of another type": ("values.npy", lambda content: content.replace(b"<f4", b"<i4")),
    "a header that is none": ("indptr.npy", lambda content: content.replace(b"{", b"(")),
    "a short description": ("about.json", lambda content: content[:-10]),
    "an empty description": ("about.json", lambda content: b""),
    "a description that is a list": ("about.json", lambda content: b"[1]"),
    "no facts": ("about.json", without_key("facts")),
    "a fact too few": ("about.json", without_key("largest")),
    "a fact that is none": ("about.json", lambda content: content.replace(b'"largest": 2', b'"largest": null')),
    "an array too few": ("about.json", lambda content: content.replace(b'"values"', b'"targets"')),
    "an array that is none": ("about.json", lambda content: content.replace(b'"values"', b'"words"')),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_made_again(damage: str, tmp_path: Path) -> None:
    file = written(tmp_path, "1 2:3\n" * 100)
    read_libsvm(file, cache=tmp_path)
    name, change = DAMAGES[damage]
    damaged = tmp_path / "text.paceline" / name
    before = damaged.read_bytes()
    damaged.write_bytes(change(before))
    assert damaged.read_bytes() != before
    read = read_libsvm(file, cache=tmp_path)
    assert (read.values.tolist(), read.columns, read.notes) == ([3.0] * 100, 3, ())
    assert damaged.read_bytes() == before


def test_texts_of_one_name_do_not_share_a_cache(tmp_path: Path) -> None:
    for value in (3, 4):
        (tmp_path / str(value)).mkdir()
        file = written(tmp_path / str(value), f"1 2:{value}\n")
        os.utime(file, ns=(1, 1))
        assert read_libsvm(file, cache=tmp_path).values.tolist() == [value]


def test_a_cache_beside_its_text_moves_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.hogwild.readers.cache.CACHED_FROM", 1)
    (tmp_path / "here").mkdir()
    read_libsvm(written(tmp_path / "here", "1 2:3\n"))
    (tmp_path / "here").rename(tmp_path / "there")
    made = (tmp_path / "there" / "text.paceline" / "about.json").stat().st_mtime_ns
    read_libsvm(tmp_path / "there" / "text")
    assert (tmp_path / "there" / "text.paceline" / "about.json").stat().st_mtime_ns == made


def test_a_mistake_leaves_no_cache(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="line 3, column 1"):
        read_libsvm(written(tmp_path, "1 2:3\n1 2:3\nx\n"), cache=tmp_path, block=6)
    assert [entry.name for entry in tmp_path.iterdir()] == ["text"]


def test_leftovers_of_killed_processes_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".text.paceline.999999999.partial").mkdir()
    read_libsvm(written(tmp_path, "1 2:3\n"), cache=tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["text", "text.paceline"]


def test_large_texts_are_cached_beside_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.hogwild.readers.cache.CACHED_FROM", 10)
    read = read_libsvm(written(tmp_path, "1 2:3\n" * 10))
    assert isinstance(read.values, np.memmap)
    assert (tmp_path / "text.paceline").is_dir()


@pytest.mark.data
@pytest.mark.parametrize("name", ["libsvm/w8a", "rcv1-small/train.svm", "libsvm/agaricus.txt.train"])
def test_real_files_are_read_as_scikit_learn_reads_them(name: str, data_dir: Path) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    wanted, targets = datasets.load_svmlight_file(str(data_dir / name), zero_based=True)
    read = read_libsvm(data_dir / name, wide=True)
    assert np.array_equal(read.targets, targets)
    for ours, theirs in ((read.indptr, wanted.indptr), (read.indices, wanted.indices), (read.values, wanted.data)):
        assert np.array_equal(ours, theirs)
    assert read.columns == wanted.shape[1]
