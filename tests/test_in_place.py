"""Tensors that travel from and to where they lie: the same bytes as through memory of one's own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.store.gathering import examine, fill_push
from paceline.store.in_place import Gradients, Parameters, with_differences
from paceline.store.layout import Arena, ModelLayouts, memory_of
from paceline.transport.pieces import Pieces

SIZES = (0, 1, 5, 16, 1000, 20_000, 40_001)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)


class Mixed(nn.Module):
    """Parameters of any size and dtype, and a buffer or two."""

    def __init__(self, entries: list[tuple[int, torch.dtype, bool]]) -> None:
        super().__init__()
        for place, (size, dtype, trained) in enumerate(entries):
            self.register_parameter(f"p{place}", nn.Parameter(numbers(size, dtype), requires_grad=trained))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mean", numbers(30_000, torch.float32))


def numbers(size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, dtype=torch.float32).to(dtype)


entries = st.lists(st.tuples(st.sampled_from(SIZES), st.sampled_from(DTYPES), st.booleans()), max_size=6)


def bytes_of(pieces: Pieces) -> bytes:
    return b"".join(pieces.stretches)


@settings(max_examples=40)
@given(entries=entries, data=st.data())
def test_a_push_has_the_bytes_of_a_copy(entries: list[tuple[int, torch.dtype, bool]], data: st.DataObject) -> None:
    model = Mixed(entries)
    for parameter in model.parameters():
        kind = data.draw(st.sampled_from(["none", "dense", "strided", "conjugate"])) if parameter.requires_grad else ""
        if kind == "dense":
            parameter.grad = numbers(parameter.numel(), parameter.dtype)
        elif kind == "strided":
            parameter.grad = numbers(2 * parameter.numel(), parameter.dtype)[::2]
        elif kind == "conjugate" and parameter.is_complex():
            parameter.grad = numbers(parameter.numel(), parameter.dtype).mul(1j).conj()
    layouts = ModelLayouts(model)
    gradients = Gradients(layouts)
    copied = torch.zeros(layouts.up.nbytes, dtype=torch.uint8)
    for _ in range(2):
        used, _, checksum = fill_push(layouts, Arena(layouts.up, copied))
        assert checksum == examine(layouts, Arena(layouts.up, copied))[1]
        pieces, told = gradients.pieces()
        assert told == used
        assert bytes_of(pieces) == bytes(memory_of(copied))
        model.zero_grad()


def test_a_sparse_gradient() -> None:
    model = nn.Embedding(5000, 8, sparse=True)
    model(torch.tensor([3, 3, 4000])).sum().backward()
    layouts = ModelLayouts(model)
    pieces, _ = Gradients(layouts).pieces()
    assert model.weight.grad is not None
    assert bytes_of(pieces) == bytes(memory_of(model.weight.grad.to_dense().view(-1).view(torch.uint8)))


@pytest.mark.parametrize("in_model", [False, True])
@settings(max_examples=30)
@given(entries=entries)
def test_parameters_arrive_in_the_model(in_model: bool, entries: list[tuple[int, torch.dtype, bool]]) -> None:
    model, other = Mixed(entries), Mixed(entries)
    layouts = ModelLayouts(model)
    sent = torch.zeros(layouts.down.nbytes, dtype=torch.uint8)
    for view, tensor in zip(layouts.down.views(sent), [*other.parameters(), *other.buffers()], strict=True):
        view.copy_(tensor.detach())
    parameters = Parameters(layouts)
    before = [parameter._version for parameter in model.parameters()]
    into = parameters.in_model() if in_model else parameters.aside
    start = 0
    for place in into.stretches:
        place[:] = memory_of(sent)[start : start + len(place)]
        start += len(place)
    parameters.take(into)
    for tensor, wanted in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(tensor, wanted)
    assert all(parameter._version > old for parameter, old in zip(model.parameters(), before, strict=True))


def test_only_what_lies_aside_is_untouched_until_it_is_taken() -> None:
    model = Mixed([(20_000, torch.float32, True)])
    parameters = Parameters(ModelLayouts(model))
    (weight, *_) = model.parameters()
    before = weight.detach().clone()
    for place in parameters.aside.stretches:
        place[:] = bytes(len(place))
    assert torch.equal(weight, before)
    for place in parameters.in_model().stretches:
        place[:] = bytes(len(place))
    assert not weight.any()


@settings(max_examples=40)
@given(entries=entries)
def test_differences_are_sent_in_place_of_the_trained_parameters(
    entries: list[tuple[int, torch.dtype, bool]],
) -> None:
    model = Mixed(entries)
    layouts = ModelLayouts(model)
    memory = torch.randint(256, (layouts.down.nbytes,), dtype=torch.uint8)
    push = Arena(layouts.up, torch.randint(256, (layouts.up.nbytes,), dtype=torch.uint8))
    wanted = memory.clone()
    places = zip(layouts.parameters, layouts.down.views(wanted), strict=False)
    for view, difference in zip((view for each, view in places if each.requires_grad), push.views, strict=False):
        view.view(torch.uint8).copy_(difference.view(torch.uint8))
    assert bytes_of(with_differences(layouts, memory, push)) == bytes(wanted.tolist())
