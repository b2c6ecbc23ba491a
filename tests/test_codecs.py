"""Codecs: their text forms, their packets, and what all of them keep to."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.codecs import CODECS, Codec, Parts, kernels, parse_codec
from paceline.codecs.packet import seal
from paceline.errors import NonFiniteInputError, UsageError, WireError

ALL = [
    "cast(to=bf16)",
    "cast(to=fp16)",
    "cast(to=fp8)",
    "qsgd(raw_below=0)",
    "qsgd(levels=1, bucket=24, norm=2, raw_below=0)",
    "qsgd(levels=1, norm=2, form=elias, raw_below=0)",
    "qsgd(levels=15, form=elias, raw_below=0)",
    "sign",
    "sign(feedback=false, vote=majority, bucket=104)",
    "top-k(density=0.1)",
    "top-k(density=0.1, momentum=0.9, clip=1.0, warm_up=3)",
    "top-k(density=0.05, sampled=0.1)",
    "top-k(density=0.1, feedback=false)",
    "sparse-ternary(density=0.1)",
    "threshold(tau=0.5)",
    "threshold(tau=1.5, form=words)",
    "threshold(tau=1.0, adaptive=0.01)",
    "power-sgd(rank=1)",
]


def parts(*shapes: tuple[int, ...]) -> Parts:
    return Parts.of([torch.zeros(shape) for shape in shapes])


def test_every_codec_is_tested() -> None:
    assert {parse_codec(text).name for text in ALL} == set(CODECS)


@pytest.mark.parametrize("text", ALL)
def test_the_text_form_is_read_back(text: str) -> None:
    codec = parse_codec(text)
    assert parse_codec(str(codec)) == codec


def decoded(codec: Codec, flat: Tensor, made_of: Parts) -> Tensor:
    out = torch.full_like(flat, 7.0)
    codec.new_state(made_of, seed=1).decode(codec.new_state(made_of, seed=0).encode(flat, step=0), out)
    return out


@pytest.mark.parametrize("text", ALL)
@pytest.mark.parametrize("count", [0, 1, 17, 1025])
def test_any_size_is_decoded_by_a_state_that_has_seen_nothing(text: str, count: int) -> None:
    flat = torch.randn(count)
    out = decoded(parse_codec(text), flat, Parts.one(count))
    assert torch.isfinite(out).all()
    assert (out * flat >= 0).all()


@pytest.mark.parametrize("text", ALL)
def test_zeros_stay_zeros(text: str) -> None:
    assert torch.equal(decoded(parse_codec(text), torch.zeros(100), parts((10, 9), (10,))), torch.zeros(100))


@pytest.mark.parametrize("text", ALL)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(text: str, bad: float) -> None:
    flat = torch.ones(100)
    flat[70] = bad
    state = parse_codec(text).new_state(Parts.one(100), seed=0)
    before = state.state_dict()
    with pytest.raises(NonFiniteInputError, match="skip this step"):
        state.encode(flat, step=0)
    assert all(torch.equal(before[name], now) for name, now in state.state_dict().items())


@pytest.mark.parametrize("text", ALL)
@given(data=st.data())
def test_an_altered_packet_is_refused(text: str, data: st.DataObject) -> None:
    state = parse_codec(text).new_state(parts((10, 9), (10,)), seed=0)
    packet = state.encode(torch.randn(100, generator=torch.Generator().manual_seed(0)), step=0)
    place = data.draw(st.integers(0, packet.numel() - 1))
    altered = packet.clone()
    altered[place] ^= data.draw(st.integers(1, 255))
    for wrong in (altered, packet[:place], torch.cat([packet, packet[:place]])):
        if wrong.numel() != packet.numel() or not torch.equal(wrong, packet):
            with pytest.raises(WireError):
                state.decode(wrong, torch.zeros(100))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", ALL)
@pytest.mark.parametrize("native", [True, False])
@given(data=st.data())
def test_a_forged_packet_is_refused_or_decoded(text: str, native: bool, data: st.DataObject) -> None:
    """Its checksum is right and its content is not: nothing outside of it, or of the values, is touched."""
    with pytest.MonkeyPatch.context() as patch:
        if not native:
            patch.setattr(kernels, "native", None)
        state = parse_codec(text).new_state(parts((10, 9), (10,)), seed=0)
        packet = state.encode(torch.randn(100, generator=torch.Generator().manual_seed(0)), step=0)
        for _ in range(data.draw(st.integers(1, 4))):
            packet[data.draw(st.integers(32, packet.numel() - 1))] = data.draw(st.integers(0, 255))
        end = data.draw(st.sampled_from([packet.numel(), packet.numel() // 8 * 4 + 32]))
        forged = seal(packet, min(end, packet.numel()), zlib.crc32(str(state.codec).encode()), 100)
        around = torch.full((300,), 7.0)
        with contextlib.suppress(WireError):
            state.decode(forged, around[100:200])
        assert (around[:100] == 7).all() and (around[200:] == 7).all()


def test_both_ends_must_have_the_same_options() -> None:
    packet = parse_codec("qsgd(raw_below=0)").new_state(Parts.one(10), seed=0).encode(torch.ones(10), step=0)
    with pytest.raises(WireError, match="another codec"):
        parse_codec("qsgd(levels=3, raw_below=0)").new_state(Parts.one(10), seed=0).decode(packet, torch.zeros(10))
    with pytest.raises(WireError, match="11 values"):
        parse_codec("qsgd(raw_below=0)").new_state(Parts.one(11), seed=0).decode(packet, torch.zeros(11))


def test_a_tensor_of_another_size_is_refused() -> None:
    with pytest.raises(UsageError, match="wants a vector of 10 values"):
        parse_codec("cast").new_state(Parts.one(10), seed=0).encode(torch.ones(11), step=0)


# Compiled loops and torch operations ----------------------------------------------------------------------------------


@pytest.fixture(params=["avx2", "baseline"])
def compiled(request: pytest.FixtureRequest) -> Iterator[str]:
    """The compiled loops with one of their instruction sets."""
    if kernels.native is None:
        pytest.skip("the compiled module was not built")
    before = kernels.native.instruction_set()
    if not kernels.native.choose_instruction_set(request.param):
        pytest.skip(f"no {request.param} here")
    yield request.param
    kernels.native.choose_instruction_set(before)


def steps_of(text: str, flats: list[Tensor], made_of: Parts) -> list[Tensor]:
    """All that a state makes in some steps: packets, decoded values, sums, and what it remembers."""
    state, out, total = parse_codec(text).new_state(made_of, seed=3), torch.zeros(made_of.count), torch.zeros(0)
    made = []
    total = torch.ones(made_of.count)
    for step, flat in enumerate(flats):
        packet = state.encode(flat, step=step)
        state.decode(packet, out)
        state.decode(packet, total, add=True)
        made += [packet, out.clone(), total.clone(), *state.state_dict().values()]
    return made


AT_ODDS = [1.0, -0.0, 1e-45, -3e-39, 1e-20, 1e20, -7.9e28, 0.1]


def odd_values(count: int, seed: int) -> Tensor:
    """Normal values, some zeros of either sign, equal, denormal and huge ones."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=random)
    places = torch.randint(len(AT_ODDS) * 4, (count,), generator=random)
    return torch.where(places < len(AT_ODDS), torch.tensor(AT_ODDS)[places % len(AT_ODDS)], values)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", ALL)
@pytest.mark.parametrize("shapes", [((0,),), ((1,),), ((33, 31), (7,)), ((250, 200), (200,), (3, 3, 5, 5), (77,))])
def test_compiled_loops_make_the_same_bytes(
    text: str, shapes: tuple[tuple[int, ...], ...], compiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_of = parts(*shapes)
    flats = [torch.randn(made_of.count), odd_values(made_of.count, 1), torch.randn(made_of.count)]
    if "fp16" in text:
        flats = [flat.clamp(-1000, 1000) for flat in flats]
    natively = steps_of(text, flats, made_of)
    monkeypatch.setattr(kernels, "native", None)
    for one, other in zip(natively, steps_of(text, flats, made_of), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
