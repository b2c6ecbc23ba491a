"""Codecs: their text forms, their packets, and what all of them keep to."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.codecs import CODECS, Codec, Parts, parse_codec
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
    "top-k(density=0.1, momentum=0.9)",
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


def test_both_ends_must_have_the_same_options() -> None:
    packet = parse_codec("qsgd(raw_below=0)").new_state(Parts.one(10), seed=0).encode(torch.ones(10), step=0)
    with pytest.raises(WireError, match="another codec"):
        parse_codec("qsgd(levels=3, raw_below=0)").new_state(Parts.one(10), seed=0).decode(packet, torch.zeros(10))
    with pytest.raises(WireError, match="11 values"):
        parse_codec("qsgd(raw_below=0)").new_state(Parts.one(11), seed=0).decode(packet, torch.zeros(11))


def test_a_tensor_of_another_size_is_refused() -> None:
    with pytest.raises(UsageError, match="wants a vector of 10 values"):
        parse_codec("cast").new_state(Parts.one(10), seed=0).encode(torch.ones(11), step=0)
