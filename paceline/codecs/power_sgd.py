"""Matrices of low rank in place of gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paceline.codecs import kernels
from paceline.codecs.base import (
    Codec,
    CodecState,
    Collective,
    Part,
    Parts,
    Pending,
    Reduction,
    can_be_coded,
    is_plain,
    store,
)
from paceline.codecs.buckets import exact_sqrt, halving_sum
from paceline.codecs.packet import Reader, put
from paceline.codecs.rounding import key_of, uniform


@dataclass(frozen=True, kw_only=True)
class PowerSGD(Codec):
    """Send each matrix M as P Q^T of a small ``rank``: one power step from the Q before (Vogels et al., 2019).

    A reduction sums P = M Q over the ranks, makes its columns orthonormal, and sums Q = M^T P. Vectors, and matrices
    that would not become smaller, are sent as they are. What P Q^T lacks is added to the values of the next step.
    """

    name: ClassVar[str] = "power-sgd"

    rank: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 1:
            raise self.mistake(f"rank must be at least 1, got {self.rank}")

    def codes(self, shape: tuple[int, ...]) -> bool:
        rows, columns = as_matrix(shape)
        return self.rank * (rows + columns) < rows * columns

    def new_state(self, parts: Parts, *, seed: int) -> PowerSGDState:
        return PowerSGDState(self, parts, seed)


class PowerSGDState(CodecState[PowerSGD]):
    """Remembers Q of each matrix, and the error. P and Q are kept as rows, which libraries multiply much faster."""

    def __init__(self, codec: PowerSGD, parts: Parts, seed: int) -> None:
        super().__init__(codec, parts, seed)
        self.shapes = [as_matrix(piece.shape) for piece in self.pieces]
        self.memory["residual"] = torch.zeros(parts.count)
        for number, (_, columns) in enumerate(self.shapes):
            # The same on all ranks, so not from the seed.
            start = uniform(key_of(0, number, 0), columns * codec.rank) - 0.5
            self.memory[f"q{number}"] = start.view(codec.rank, columns)

    # As packets -------------------------------------------------------------------------------------------------------

    def most_bytes(self, piece: Part) -> int:
        return 4 * self.codec.rank * sum(as_matrix(piece.shape))

    def prepare(self, values: Tensor, *, step: int) -> Tensor:
        for piece in self.pieces:
            self.memory["residual"][piece.place] += values[piece.place]
        return self.memory["residual"]

    def encode_piece(self, number: int, values: Tensor, into: Tensor, at: int, *, step: int) -> int:
        matrix = values.view(self.shapes[number])
        p = orthonormal((matrix @ self.memory[f"q{number}"].T).T)
        q = p @ matrix
        self.remember(number, p, q, q)
        return put(into, put(into, at, p), q)

    def decode_piece(self, number: int, packet: Reader, out: Tensor, *, add: bool) -> None:
        (rows, columns), rank = self.shapes[number], self.codec.rank
        p = packet.take(rows * rank, torch.float32).view(rank, rows)
        q = packet.take(columns * rank, torch.float32).view(rank, columns)
        add_product(out.view(rows, columns), p, q, add=add)

    def remember(self, number: int, p: Tensor, own_q: Tensor, q: Tensor) -> None:
        """Keep what this rank's own part of the sum lacks, and Q, but for rows of zeros, which would stay zeros."""
        self.matrix(number).addmm_(p.T, own_q, alpha=-1)
        start = self.memory[f"q{number}"]
        start.copy_(torch.where((q != 0).any(1, keepdim=True), q, start))

    def matrix(self, number: int) -> Tensor:
        """The error of a matrix, to which ``prepare`` adds the values."""
        return self.memory["residual"][self.pieces[number].place].view(self.shapes[number])

    # As a reduction ---------------------------------------------------------------------------------------------------

    def reduce(self, flat: Tensor, group: Collective, *, step: int) -> Pending:
        """Start summing a flat tensor over all ranks, in place, by two sums of less; NaN is NaN on every rank."""
        self._check_shape(flat)
        values = flat.detach().to("cpu", torch.float32)
        fits = can_be_coded(values)
        if fits:
            self.prepare(values, step=step)
        matrices = [self.matrix(number) for number in range(len(self.pieces))]
        firsts = [(matrix @ self.memory[f"q{number}"].T).T for number, matrix in enumerate(matrices)]
        sent = joined([*firsts, *(values[part.place] for part in self.raw)])
        if not fits:
            sent.fill_(math.nan)
        pending = group.all_reduce(sent)

        def finish() -> None:
            pending.wait()
            if not can_be_coded(sent):
                self.spoil(flat)
                return
            *sums, raw = split(sent, firsts)
            ps = [orthonormal(p) for p in sums]
            own = [p @ matrix for matrix, p in zip(matrices, ps, strict=True)]
            together = joined(own)
            group.all_reduce(together).wait()
            *qs, _ = split(together, own)
            self._finish(flat, ps, own, qs, raw)

        return Reduction(finish)

    def _finish(self, flat: Tensor, ps: list[Tensor], own: list[Tensor], qs: list[Tensor], raw: Tensor) -> None:
        result = flat if is_plain(flat) else torch.zeros(flat.shape)
        for number, piece in enumerate(self.pieces):
            self.remember(number, ps[number], own[number], qs[number])
            add_product(result[piece.place].view(self.shapes[number]), ps[number], qs[number], add=False)
        at = 0
        for part in self.raw:
            result[part.place] = raw[at : at + part.count]
            at += part.count
        if result is not flat:
            flat.copy_(result)


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """The rows and columns of a tensor as a matrix; a vector has one row.

    >>> as_matrix((16, 3, 5, 5)), as_matrix((10,))
    ((16, 75), (1, 10))
    """
    rows = shape[0] if len(shape) > 1 else 1
    return rows, math.prod(shape[1:]) if len(shape) > 1 else math.prod(shape)


def orthonormal(p: Tensor) -> Tensor:
    """The rows made orthonormal by Gram and Schmidt, with sums in an order that every machine follows."""
    if kernels.native is not None:
        p = p.clone(memory_format=torch.contiguous_format)
        kernels.native.make_orthonormal(p.data_ptr(), *p.shape)
        return p
    rows = p.double().contiguous()
    for number, row in enumerate(rows):
        size = exact_sqrt(halving_sum(row.square().unsqueeze(0)))
        row.div_(torch.where(size > 0, size, 1.0))
        others = rows[number + 1 :]
        others -= halving_sum(others * row).unsqueeze(1) * row
    return rows.to(torch.float32)


def add_product(out: Tensor, p: Tensor, q: Tensor, *, add: bool) -> None:
    """Write P^T Q to a matrix, or add it: row by row of both, since a library's product has other bits elsewhere."""
    (rows, columns), rank = out.shape, p.shape[0]
    if kernels.native is not None:
        p, q = p.contiguous(), q.contiguous()
        kernels.native.add_products(p.data_ptr(), q.data_ptr(), rows, columns, rank, out.data_ptr(), add)
        return
    total = p[0].unsqueeze(1) * q[0]
    for number in range(1, rank):
        total += p[number].unsqueeze(1) * q[number]
    store(out, total, add=add)


def joined(tensors: list[Tensor]) -> Tensor:
    """All tensors as one vector."""
    return torch.cat([tensor.flatten() for tensor in tensors]) if tensors else torch.empty(0)


def split(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """The opposite of ``joined``, and behind the tensors what is left."""
    sizes = [tensor.numel() for tensor in like]
    pieces = torch.split_with_sizes(flat, [*sizes, flat.numel() - sum(sizes)])
    return [*(piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=False)), pieces[-1]]
