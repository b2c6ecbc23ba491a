"""Any training state comes back from a checkpoint as it was, to the last bit and the exact type."""

from __future__ import annotations

import enum
import json
import math
import string
import tempfile
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from same_bits import assert_same
from torch import Tensor, nn

from paceline.errors import CheckpointError
from paceline.record.checkpoint import read_checkpoint, write_checkpoint
from paceline.record.state_tree import pack, unpack

law = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def through_file(state: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "state.safetensors"
        write_checkpoint(file, state)
        return read_checkpoint(file)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any dtype, any small shape and any bits: NaNs with payloads, negative zeros, subnormals."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    content = draw(st.binary(min_size=size, max_size=size))
    if dtype == torch.bool:
        content = bytes(byte & 1 for byte in content)
    flat = torch.tensor(list(content), dtype=torch.uint8).view(dtype)
    tensor = flat.reshape(shape)
    transposed = draw(st.booleans())
    return tensor.transpose(0, -1) if shape and transposed else tensor


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ["$tensor", "$tuple", "$dict", "", ".", "a.b", "~2"]
)
numbers = st.integers() | st.integers(2**63, 2**200) | st.floats() | st.sampled_from([-0.0, math.nan, math.inf])
scalars = st.none() | st.booleans() | numbers | texts | st.text(st.characters(), max_size=4)
keys = st.recursive(
    texts | st.integers() | st.none() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
states = st.recursive(
    scalars | tensors(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(texts, inner, max_size=3)
        | st.dictionaries(keys, st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=12,
)


@law
@given(states)
def test_packing_and_unpacking_give_the_state_back(state: Any) -> None:
    tree, tensors = pack(state)
    assert_same(unpack(json.loads(json.dumps(tree)), tensors), state)


@settings(law, max_examples=60)
@given(st.dictionaries(texts, states, max_size=3))
def test_a_file_gives_the_state_back(state: dict[str, Any]) -> None:
    assert_same(through_file(state), state)


@pytest.mark.parametrize(
    "state",
    [
        {"\ud800": torch.ones(2)},
        {"\ud800": "\udfff"},
        {"__metadata__": torch.ones(2)},
        {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, "a.b~2": torch.ones(2)},
        {"": torch.zeros(1), ".": torch.ones(1)},
        {"nul \0 end": torch.zeros(1)},
    ],
    ids=ascii,
)
def test_names_of_tensors_may_be_anything(state: dict[str, Any]) -> None:
    assert_same(through_file(state), state)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_kept(dtype: torch.dtype) -> None:
    content = torch.arange(48, dtype=torch.uint8) & (1 if dtype == torch.bool else 255)
    tensor = content.view(dtype)
    state = {"tensor": tensor, "one": tensor[0], "none": tensor[:0], "square": tensor[:1].expand(2, 2)}
    assert_same(through_file(state), state)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).T,
        torch.arange(12.0)[::3],
        torch.ones(3).expand(5, 3),
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(0, 3),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
        nn.Parameter(torch.ones(2)),
        torch.ones(2, requires_grad=True) * 2,
    ],
    ids=["transposed", "strided", "expanded", "channels last", "empty", "conj", "neg", "parameter", "graph"],
)
def test_views_of_every_kind_are_saved_by_their_values(tensor: Tensor) -> None:
    assert_same(through_file({"x": tensor}), {"x": tensor})


def test_views_of_one_memory_are_each_saved_whole() -> None:
    memory = torch.arange(10.0)
    state = {"all": memory, "tied": memory, "part": memory[2:5], "again": [memory[1:], memory.view(5, 2)]}
    assert_same(through_file(state), state)


def test_what_was_saved_does_not_change_with_the_tensor() -> None:
    weight = torch.zeros(3)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder) / "x", {"w": weight})
        weight += 1
        found = read_checkpoint(Path(folder) / "x")
        (Path(folder) / "x").write_bytes(b"")  # what was read does not depend on the file any more
        assert_same(found, {"w": torch.zeros(3)})


def test_reading_a_tensor_gives_one_that_can_be_written_to() -> None:
    found = through_file({"w": torch.zeros(3)})
    found["w"] += 1
    assert found["w"].sum() == 3


@pytest.mark.parametrize(
    "value",
    [
        np.float64(0.1),
        np.float32(0.1),
        np.int64(-3),
        np.uint8(3),
        np.bool_(True),
        np.arange(6.0).reshape(2, 3),
        np.arange(6, dtype=np.uint32)[::2],
        np.array(2.5),
        np.zeros((0, 2), dtype=np.int16),
    ],
    ids=lambda value: f"{value.dtype}-{value.shape}",
)
def test_numpy_values_come_back_with_their_value_and_no_other_shape(value: Any) -> None:
    """Equal by value, and of use where the value was: a scalar as a number, an array as an array."""
    found = through_file({"x": value})["x"]
    assert isinstance(found, np.ndarray) == isinstance(value, np.ndarray), type(found)
    assert not isinstance(found, Tensor)
    assert np.array_equal(np.asarray(found), value)
    assert np.asarray(found).shape == value.shape


def test_numpy_keys_are_keys_again() -> None:
    assert through_file({"milestones": Counter({np.int64(3): 2})})["milestones"][3] == 2


def test_a_numpy_generator_goes_on_where_it_was() -> None:
    generator = np.random.Generator(np.random.MT19937(5))
    generator.random(7)
    saved = through_file({"rng": dict(generator.bit_generator.state)})
    expected = generator.random(700)
    other = np.random.Generator(np.random.MT19937(6))
    other.bit_generator.state = saved["rng"]
    assert np.array_equal(other.random(700), expected)


class Colour(enum.IntEnum):
    RED = 3


Pair = namedtuple("Pair", "left right")


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (defaultdict(int, {3: 1}), {3: 1}),
        (torch.Size([2, 3]), (2, 3)),
        (Pair(1, "x"), (1, "x")),
        (Colour.RED, 3),
    ],
)
def test_what_is_a_plain_value_by_inheritance_becomes_one(value: Any, plain: Any) -> None:
    assert through_file({"x": value})["x"] == plain


class Thing:
    """Nothing that a checkpoint could hold."""


@pytest.mark.parametrize(
    "thing",
    [
        Thing(),
        {1, 2},
        b"bytes",
        1j,
        lambda: None,
        torch.float32,
        torch.device("cpu"),
        torch.Generator(),
        np.array(["text"]),
        np.array([Thing()]),
        np.datetime64("2020-01-01"),
        np.arange(3, dtype=">i4"),
        torch.zeros(2, device="meta"),
        torch.eye(2).to_sparse(),
        torch.zeros(2, dtype=torch.complex128),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_what_cannot_be_saved_is_named_by_its_path(thing: Any, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    write_checkpoint(file, {"good": 1})
    try:
        write_checkpoint(file, {"stateful": {"mine": [0, {7: thing}]}})
    except CheckpointError as error:
        assert "stateful.mine.1.7" in str(error)
        assert_same(read_checkpoint(file), {"good": 1})
    else:  # a later version may learn to keep more
        found = read_checkpoint(file)["stateful"]["mine"][1][7]
        assert np.array_equal(np.asarray(found), np.asarray(thing))
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.safetensors"]


def test_key_that_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="state"):
        write_checkpoint(tmp_path / "x", {"state": {frozenset([1]): 2}})


@law
@given(st.dictionaries(st.text(string.ascii_letters), st.integers()))
def test_the_order_of_keys_is_kept(state: dict[str, int]) -> None:
    assert list(unpack(*pack(state))) == list(state)
