"""Pushes and parameters through a codec, without a server: nothing is lost, and both ends have the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from live import Weights
from torch import Tensor, nn

from paceline.codecs import Codec, parse_codec
from paceline.errors import UsageError, WireError
from paceline.policies.messages import PushKind
from paceline.store.behind import Behind
from paceline.store.layout import Arena, ModelLayouts
from paceline.store.packets import PartPackets, PushPackets
from paceline.store.partition import layouts_of

SHAPES = (5, 2, 9)
FEEDBACK = [
    "sign(bucket=8)",
    "top-k(density=0.2)",
    "sparse-ternary(density=0.2)",
    "threshold(tau=2.0)",
    "power-sgd(rank=1)",
]
EVERY = [*FEEDBACK, "cast(to=fp8)", "qsgd(levels=3, bucket=8, raw_below=0)"]
VALUES = st.lists(st.integers(-9, 9), min_size=sum(SHAPES), max_size=sum(SHAPES)).map(
    lambda numbers: torch.tensor(numbers, dtype=torch.float32)
)


class Matrices(Weights):
    """Of two dimensions, of which power-sgd makes less, and one without a gradient."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__(*SHAPES)
        self.weights.append(nn.Parameter(torch.zeros(6, 7)))
        self.weights.append(nn.Parameter(torch.zeros(3)))
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))


def coding_of(codec: str, *, servers: int = 1, kind: PushKind = PushKind.GRADIENT) -> tuple[Matrices, PushPackets]:
    model = Matrices()
    return model, PushPackets(parse_codec(codec), layouts_of(model, servers), kind, seed=0, rank=0)


def set_gradients(model: Matrices, values: Tensor) -> None:
    *small, matrix, unused = model.weights
    for parameter, part in zip(small, torch.split_with_sizes(values, SHAPES), strict=True):
        parameter.grad = part.clone() if part.any() else None
    matrix.grad = values[:6].unsqueeze(1) * values[-7:]
    unused.grad = None


def gradients(model: nn.Module) -> Tensor:
    return torch.cat(
        [(torch.zeros_like(each) if each.grad is None else each.grad).flatten() for each in model.parameters()]
    )


def residual_of(coding: PushPackets) -> Tensor:
    return torch.cat([part.state.memory["residual"] for part in coding.parts])


@given(
    turns=st.lists(st.tuples(VALUES, st.booleans()), min_size=1, max_size=6),
    codec=st.sampled_from(FEEDBACK),
    servers=st.integers(1, 3),
)
def test_what_was_taken_is_what_was_applied_and_what_waits(
    turns: Sequence[tuple[Tensor, bool]], codec: str, servers: int
) -> None:
    model, coding = coding_of(codec, servers=servers)
    taken_sum = applied = torch.zeros(sum(SHAPES) + 42 + 3)
    for values, taken in turns:
        set_gradients(model, values)
        before = gradients(model)
        coding.code()
        if taken:
            taken_sum, applied = taken_sum + before, applied + gradients(model)
        coding.answered(taken=taken)
    exact = codec.startswith(("top-k", "threshold"))  # of whole numbers
    torch.testing.assert_close(
        applied + residual_of(coding), taken_sum, rtol=0, atol=0 if exact else 1e-3, msg=lambda text: f"{codec}: {text}"
    )


@given(
    turns=st.lists(st.tuples(VALUES, st.booleans()), min_size=1, max_size=6),
    codec=st.sampled_from(EVERY),
    servers=st.integers(1, 3),
    kind=st.sampled_from(PushKind),
)
def test_a_server_decodes_what_a_replay_has_and_what_is_not_taken_leaves_no_trace(
    turns: Sequence[tuple[Tensor, bool]], codec: str, servers: int, kind: PushKind
) -> None:
    """A second worker never makes the pushes that are not taken: a replay knows nothing of them."""
    (model, coding), (other, without) = (coding_of(codec, servers=servers, kind=kind) for _ in range(2))
    parts = layouts_of(Matrices(), servers)
    decoders = [PartPackets(parse_codec(codec), part, kind) for part in parts]
    last: list[Tensor | None] = [None] * servers
    for values, taken in turns:
        set_gradients(model, values)
        model.count += 1
        packets = coding.encode()
        arenas = [Arena(part.up) for part in parts]
        decoded = []
        for place, (decoder, arena) in enumerate(zip(decoders, arenas, strict=True)):
            sent = coding.parts[place].pieces(packets[place])
            came = torch.frombuffer(bytearray(b"".join(sent.stretches)), dtype=torch.uint8)
            decoder.unpack(came, arena, last[place])
            decoded.append(decoder.decoded())
        assert torch.equal(arenas[0].views[len(parts[0].trained)], model.count), "buffers are sent as they are"
        coding.answered(taken=taken)
        if taken:
            last = decoded
            set_gradients(other, values)
            without.code()
            without.answered(taken=True)
            found = [
                view for arena, part in zip(arenas, parts, strict=True) for view in arena.views[: len(part.trained)]
            ]
            assert torch.equal(torch.cat([view.flatten() for view in found]), gradients(other))


@pytest.mark.parametrize("codec", EVERY)
def test_a_gradient_that_is_not_finite_is_a_packet_of_nothing(codec: str) -> None:
    model, coding = coding_of(codec, servers=2)
    set_gradients(model, torch.ones(sum(SHAPES)))
    coding.code()
    coding.answered(taken=True)
    before = [part.state.state_dict() for part in coding.parts]
    for bad in (float("nan"), float("inf"), 1e30):
        set_gradients(model, torch.ones(sum(SHAPES)))
        next(iter(model.parameters())).grad = torch.full((5,), bad)
        assert [packet.numel() for packet in coding.encode()] == [0, 0]
        coding.put_in_place()
        assert gradients(model).isnan().all()
        coding.answered(taken=False)
        for part, remembered in zip(coding.parts, before, strict=True):
            for name, tensor in remembered.items():
                assert torch.equal(part.state.memory[name], tensor)


def test_what_is_too_short_for_buffers_is_refused() -> None:
    layouts = ModelLayouts(Matrices())
    codec = parse_codec("cast")
    with pytest.raises(WireError, match="at least 64 bytes, found 3"):
        PartPackets(codec, layouts).unpack(torch.zeros(3, dtype=torch.uint8), Arena(layouts.up))
    with pytest.raises(WireError, match="at least 64 bytes, found 3"):
        Behind(codec, layouts).unpack(torch.zeros(3, dtype=torch.uint8), [])
    with pytest.raises(WireError, match="wanted a first packet"):
        PartPackets(codec, layouts, PushKind.PARAMETERS).decode(torch.zeros(8, dtype=torch.uint8))


def test_complex_parameters_are_refused() -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(3, dtype=torch.complex64))])
    with pytest.raises(UsageError, match="complex"):
        PartPackets(parse_codec("cast"), ModelLayouts(model))


# The way down --------------------------------------------------------------------------------------------------------


def both_ends(codec: Codec) -> tuple[Behind, Behind, list[Tensor], list[Tensor]]:
    """The server's end and the worker's, and the parameters and buffers of both."""
    layouts = [ModelLayouts(Matrices()) for _ in range(2)]
    views = [Arena(each.down).views for each in layouts]
    server, worker = Behind(codec, layouts[0], seed=3, rank=1), Behind(codec, layouts[1])
    return server, worker, views[0], views[1]


@given(turns=st.lists(VALUES, min_size=1, max_size=6), codec=st.sampled_from(EVERY))
def test_server_and_worker_agree_on_what_the_worker_has(turns: Sequence[Tensor], codec: str) -> None:
    server, worker, theirs, mine = both_ends(parse_codec(codec))
    assert server.encode(theirs, version=0) is None, "it has nothing yet"
    for end, views in ((server, theirs), (worker, mine)):
        end.take_all(views)
    for version, values in enumerate(turns):
        for view, part in zip(theirs, torch.split_with_sizes(values, SHAPES), strict=False):
            view.add_(part)
        theirs[-1].add_(1)
        packet = server.encode(theirs, version=version)
        assert packet is not None
        came = torch.frombuffer(bytearray(b"".join(server.pieces(packet, theirs).stretches)), dtype=torch.uint8)
        worker.unpack(came, mine)
        has = [view.clone() for view in theirs]
        server.write(has)
        assert all(torch.equal(one, other) for one, other in zip(mine, has, strict=True))


@pytest.mark.parametrize("codec", EVERY)
def test_a_worker_comes_near_to_parameters_that_stay(codec: str) -> None:
    """What packets leave out stays in the difference."""
    server, _, theirs, _ = both_ends(parse_codec(codec))
    server.take_all(theirs)
    for view in theirs[:-1]:
        view.copy_(torch.linspace(-6, 6, view.numel()).view(view.shape))
    for version in range(60):
        server.encode(theirs, version=version)
    has = [view.clone() for view in theirs]
    server.write(has)
    most = 2.0 if codec.startswith("threshold") else 0.2
    assert max(float((one - other).abs().max()) for one, other in zip(theirs[:-1], has, strict=False)) <= most


def test_parameters_that_cannot_be_coded_are_sent_as_they_are() -> None:
    server, _, theirs, _ = both_ends(parse_codec("sign"))
    server.take_all(theirs)
    theirs[0].fill_(1e30)
    assert server.encode(theirs, version=1) is None
