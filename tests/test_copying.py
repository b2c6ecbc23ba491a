"""Copies that go past the caches, and those that look at what they copy, against torch's own."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline import native
from paceline.store.copying import copy, copy_all, copy_and_look, look_at

LARGE = 1 << 20
SIZES = st.one_of(st.integers(0, 600), st.integers(LARGE - 40, LARGE + 300))


@pytest.fixture(params=["best", "baseline"])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    if not native.available():
        pytest.skip(native.reason())
    from paceline.native import _core

    before = _core.instruction_set()
    if request.param != "best":
        assert _core.choose_instruction_set(request.param)
    yield request.param
    _core.choose_instruction_set(before)


def random_bytes(size: int, seed: int) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.usefixtures("instruction_set")
@settings(max_examples=60)
@given(size=SIZES, start=st.integers(0, 70), place=st.integers(0, 70))
def test_a_copy_has_the_bytes_and_nothing_beside_it_changes(size: int, start: int, place: int) -> None:
    from paceline.native import _core

    source, target = random_bytes(start + size, seed=size), random_bytes(place + size + 70, seed=size + 1)
    wanted = target.clone()
    wanted[place : place + size] = source[start:]
    _core.copy_past_cache(target.data_ptr() + place, source.data_ptr() + start, size)
    assert torch.equal(target, wanted)


@pytest.mark.usefixtures("instruction_set")
@settings(max_examples=60)
@given(words=SIZES.map(lambda size: size // 4), place=st.integers(0, 20), bad=st.none() | st.integers(0, 2**31))
def test_a_copy_that_looks_finds_what_a_look_at_the_copy_finds(words: int, place: int, bad: int | None) -> None:
    source = torch.randn(words, generator=torch.Generator().manual_seed(words))
    if bad is not None and words:
        source[bad % words] = (torch.nan, torch.inf, -torch.inf)[bad % 3]
    memory = torch.zeros(place + words + 16)
    padded = memory[place : place + words + words % 2]
    look = copy_and_look(memory[place : place + words], source, padded)
    assert torch.equal(memory[place : place + words].view(torch.int32), source.view(torch.int32))
    assert not memory[:place].any() and not memory[place + words :].any()
    assert look.finite == bool(torch.isfinite(source).all())
    raw = bytes(padded.view(torch.uint8).numpy())
    assert look.checksum % 2**64 == sum(word for (word,) in struct.iter_unpack("<Q", raw)) % 2**64


DTYPES = [torch.float32, torch.float16, torch.float64, torch.int64, torch.bool]


@settings(max_examples=40, deadline=None)
@given(
    kinds=st.lists(st.tuples(st.sampled_from([0, 3, 64, LARGE]), st.sampled_from(DTYPES), st.booleans()), max_size=6)
)
def test_many_are_copied_as_each_would_be(kinds: list[tuple[int, torch.dtype, bool]]) -> None:
    sources = [torch.randint(0, 2, (2, size)).to(dtype) for size, dtype, _ in kinds]
    targets = [
        (torch.zeros(source.shape[::-1], dtype=source.dtype).t() if turned else torch.zeros_like(source))
        for source, (*_, turned) in zip(sources, kinds, strict=True)
    ]
    parameters: list[Tensor] = [torch.nn.Parameter(target, target.is_floating_point()) for target in targets]
    versions = [parameter._version for parameter in parameters]
    copy_all(parameters, sources)
    for parameter, source, version in zip(parameters, sources, versions, strict=True):
        assert torch.equal(parameter.detach(), source)
        assert parameter._version > version, "autograd would not notice"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("kind", ["dense", "strided", "sparse", "needs a gradient"])
def test_every_kind_of_tensor_is_copied_and_looked_at(dtype: torch.dtype, kind: str) -> None:
    source = torch.arange(96, dtype=torch.float32).view(8, 12).to(dtype)
    given_as = {
        "dense": source,
        "strided": torch.stack([source, source], dim=-1)[..., 0],
        "sparse": source.to_sparse(),
        "needs a gradient": source.clone().requires_grad_(),
    }[kind]
    target = torch.zeros_like(source)
    look = copy_and_look(target, given_as, target.view(-1))
    assert torch.equal(target, source)
    assert look.finite and look.checksum % 2**64 == look_at(source.reshape(-1)).checksum % 2**64


def test_autograd_notices_a_copy_past_the_caches() -> None:
    weight = torch.ones(LARGE // 4, requires_grad=True)
    loss = (weight**2).sum()
    with torch.no_grad():
        copy(weight, torch.zeros(LARGE // 4))
    assert not weight.any()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(loss)
