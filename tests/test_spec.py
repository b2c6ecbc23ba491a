"""The text form of options: what is printed reads back, and what cannot be read says where and why."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.spec import MAX_DEPTH, Value, check_types, from_spec, parse_call, print_call, to_spec

law = settings(deadline=None)
WORDS = st.from_regex(r"[A-Za-z][A-Za-z0-9_.-]{0,8}", fullmatch=True)
TRICKY = st.sampled_from(
    [
        *("1", "1.0", "true", "False", "inf", "NaN", "-inf", "1e-3", "", "a b", '"', "\\", "a\n", '\\"'),
        *("a(b=1)", "a(b=1.50)", "a()", "a(b=(1, 2))", "a(b=c(d=1))", "true(a=1)", 'a(b="(")', "a(b=1) "),
    ]
)
VALUES = st.recursive(
    st.integers() | st.floats() | st.booleans() | st.text(max_size=10) | TRICKY | WORDS,
    lambda inner: st.lists(inner, max_size=4).map(tuple),
    max_leaves=6,
)
NEARLY_VALID = st.text(alphabet='ak1-+.e_=(), "\\\n\u00e9', max_size=30)


def typed(value: Value) -> object:
    """A form in which 1, 1.0, True and "1" all differ, and nan equals nan."""
    if isinstance(value, tuple):
        return [typed(item) for item in value]
    return type(value).__name__, repr(value)


@law
@given(WORDS, st.dictionaries(WORDS, VALUES, max_size=4))
def test_printed_calls_read_back_with_their_types(name: str, values: dict[str, Value]) -> None:
    text = print_call(name, values)
    read_name, read = parse_call(text)
    assert read_name == name
    assert list(read) == list(values)
    assert {key: typed(value) for key, value in read.items()} == {key: typed(v) for key, v in values.items()}
    assert print_call(read_name, read) == text


@law
@given(st.text() | NEARLY_VALID | NEARLY_VALID.map(lambda inside: f"k(a={inside})"))
def test_any_text_reads_or_is_refused(text: str) -> None:
    try:
        name, values = parse_call(text)
    except UsageError as error:
        assert "column" in str(error) and "\n" not in str(error)
    else:
        assert parse_call(print_call(name, values))[0] == name


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("name", {}),
        (" name ( ) ", {}),
        ("name(k=3,lr=0.1)", {"k": 3, "lr": 0.1}),
        ("name( a = -1 , b = +2.5e-3 , )", {"a": -1, "b": 0.0025}),
        ("name(a=.5, b=1., c=1e3)", {"a": 0.5, "b": 1.0, "c": 1000.0}),
        ("name(a=TRUE, b=False)", {"a": True, "b": False}),
        ("name(a=inf, b=-INF)", {"a": math.inf, "b": -math.inf}),
        ("name(a=ring, b=v1.2-rc_3)", {"a": "ring", "b": "v1.2-rc_3"}),
        (r'name(a="x \" \\ y", b="true", c="")', {"a": r"x " + '"' + r" \ y", "b": "true", "c": ""}),
        ("name(a=other( b = 1 ), c=2)", {"a": "other(b=1)", "c": 2}),
        ("name(a=other(b=(1,), c=x), d=(e(f=1), g()))", {"a": "other(b=(1,), c=x)", "d": ("e(f=1)", "g")}),
        (
            "name(a=(), b=(1,), c=(0.9, 0.999), d=(1, (x, true),))",
            {"a": (), "b": (1,), "c": (0.9, 0.999), "d": (1, ("x", True))},
        ),
    ],
)
def test_reads(text: str, values: dict[str, Value]) -> None:
    name, read = parse_call(text)
    assert name == "name"
    assert {key: typed(value) for key, value in read.items()} == {key: typed(v) for key, v in values.items()}


def test_not_a_number_reads() -> None:
    value = parse_call("name(a=nan)")[1]["a"]
    assert isinstance(value, float) and math.isnan(value)


@pytest.mark.parametrize(
    ("text", "column", "reason"),
    [
        ("", 1, "wanted a name"),
        ("3", 1, "wanted a name"),
        ("k-sync(3)", 8, "write the option's name, as in k-sync(option=3)"),
        ("k-sync(ring)", 8, "write the option's name, as in k-sync(option=ring)"),
        ('k-sync(a=1, "x")', 13, "write the option's name"),
        ("k-sync(k=3", 11, "has the end, wanted , or )"),
        ("k-sync(k=3) x", 13, "has 'x', wanted the end"),
        ("k-sync(k 3)", 10, "wanted = after the option's name k"),
        ("k-sync(k=)", 10, "wanted a value"),
        ("k-sync(k=1 j=2)", 12, "wanted , or )"),
        ("k-sync(,)", 8, "wanted an option as name=value"),
        ("k-sync(k=1, k=2)", 13, "k was given before"),
        ("k-sync(k=3x)", 10, "has '3x', wanted a number or a word; put other text in double quotes"),
        ("k-sync(k=(1))", 12, "a tuple of one value is written (value,)"),
        ("k-sync(k='x')", 10, "text in double quotes"),
        ('k-sync(k="x)', 10, "text closed by a double quote"),
        (r'k-sync(k="\n")', 10, r"\" and \\ as its only escapes"),
        ("k(a=" + "(" * (MAX_DEPTH + 1), 5 + MAX_DEPTH, "tuples inside each other"),
    ],
)
def test_refusals_point_at_the_place(text: str, column: int, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_call(text)
    assert f"column {column} " in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "value", ["(" * 100_000, "9" * 5_000, '"' * 5_001, "x" * 5_000 + "/"], ids=lambda text: text[0]
)
def test_hostile_lengths_are_refused_with_a_short_message(value: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_call(f"k(a={value})")
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("word", ["", "1a", "a b", "a\n", "-a", "\u00e9"])
def test_words_that_would_not_read_back_are_not_printed(word: str) -> None:
    with pytest.raises(UsageError, match="cannot be a name"):
        print_call(word, {})
    with pytest.raises(UsageError, match="cannot be a name"):
        print_call("name", {word: 1})


def test_values_without_a_text_form_are_not_printed() -> None:
    nothing: Any = None
    with pytest.raises(TypeError, match="None has no text form"):
        print_call("name", {"a": nothing})


@dataclass(frozen=True, kw_only=True)
class Ring:
    k: int
    rate: float = 0.5
    cap: int | None = None
    both: float | int = 1
    fast: bool = True
    title: str = ""
    mode: Literal["mean", "sum"] = "mean"
    betas: tuple[float, float] = (0.9, 0.999)
    sizes: tuple[int, ...] = field(default_factory=tuple)


@dataclass(frozen=True)
class Bare:
    pass


TABLE: dict[str, type[Ring] | type[Bare]] = {"ring": Ring, "bare": Bare}
RINGS = st.builds(
    Ring,
    k=st.integers(),
    rate=st.floats(allow_nan=False),
    cap=st.none() | st.integers(),
    both=st.integers() | st.floats(allow_nan=False),
    fast=st.booleans(),
    title=st.text(max_size=5),
    mode=st.sampled_from(["mean", "sum"]),
    betas=st.tuples(st.floats(allow_nan=False), st.floats(allow_nan=False)),
    sizes=st.lists(st.integers(), max_size=3).map(tuple),
)


@law
@given(RINGS)
def test_settings_read_back_from_their_text(ring: Ring) -> None:
    text = to_spec("ring", ring)
    assert from_spec("shape", TABLE, text) == ring
    assert to_spec("ring", from_spec("shape", TABLE, text)) == text


def test_text_holds_only_what_differs_from_the_defaults() -> None:
    assert to_spec("ring", Ring(k=3)) == "ring(k=3)"
    assert to_spec("ring", Ring(k=3, rate=0.5, sizes=(4,))) == "ring(k=3, sizes=(4,))"
    assert to_spec("bare", Bare()) == "bare"


def test_equal_settings_have_equal_text() -> None:
    assert to_spec("ring", Ring(k=3, rate=2, betas=(0, 1))) == to_spec("ring", Ring(k=3, rate=2.0, betas=(0.0, 1.0)))


def test_whole_numbers_become_numbers_where_those_are_wanted() -> None:
    ring = from_spec("shape", TABLE, "ring(k=1, rate=2, betas=(0, 1), both=3)")
    assert isinstance(ring, Ring)
    assert typed((ring.rate, *ring.betas, ring.both)) == typed((2.0, 0.0, 1.0, 3))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rinf(k=1)", "no shape called 'rinf'. Did you mean 'ring'? Known: bare, ring."),
        (
            "ring(k=1, bettas=(1, 2))",
            "shape 'ring' has no option 'bettas'. Did you mean 'betas'? Options: k, rate, ",
        ),
        ("ring(k=1, zzz=2)", "shape 'ring' has no option 'zzz'. Options: k, "),
        ("bare(k=1)", "shape 'bare' has no option 'k'; it takes none"),
        ("ring", "shape 'ring' needs the option k; for example ring(k=1)"),
        ("ring(k=x)", "k wants a whole number, got 'x'; for example ring(k=1)"),
        ("ring(k=1.0)", "k wants a whole number, got 1.0"),
        ("ring(k=true)", "k wants a whole number, got True"),
        ('ring(k="1")', "k wants a whole number, got '1'"),
        ("ring(k=1, cap=x)", "cap wants a whole number, got 'x'; for example ring(cap=1)"),
        ("ring(k=1, rate=true)", "rate wants a number, got True"),
        ("ring(k=1, rate=1" + "0" * 400 + ")", "rate wants a number"),
        ("ring(k=1, fast=1)", "fast wants true or false, got 1; for example ring(fast=true)"),
        ("ring(k=1, title=3)", "title wants text, got 3; for example ring(title=text)"),
        ("ring(k=1, mode=max)", "mode wants one of mean, sum, got 'max'; for example ring(mode=mean)"),
        ("ring(k=1, betas=(1, 2, 3))", "betas wants a tuple of 2: a number, a number, got (1, 2, 3)"),
        ("ring(k=1, betas=0.9)", "for example ring(betas=(0.5, 0.5))"),
        ("ring(k=1, sizes=(1, x))", "sizes wants a tuple, each item a whole number, got (1, 'x')"),
        ("ring(k=1, both=x)", "both wants a number or a whole number, got 'x'"),
    ],
)
def test_wrong_options_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        from_spec("shape", TABLE, text)
    assert message in str(caught.value)


def test_types_of_settings_made_in_python_are_checked_likewise() -> None:
    check_types("shape", "ring", Ring(k=1, rate=2, cap=None))
    wrong: Any = "3"
    with pytest.raises(UsageError, match="k wants a whole number, got '3'"):
        check_types("shape", "ring", Ring(k=wrong))
