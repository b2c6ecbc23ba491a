"""Small sparse problems made from a seed, to try the engine without any data."""

from __future__ import annotations

import numpy as np

from paceline.hogwild.readers import FlowNetwork, LibsvmRows, RatingEntries
from paceline.hogwild.readers.cache import Array


def sparse_rows(seed: int, *, rows: int, columns: int, per_row: int, flipped: float = 0.02) -> LibsvmRows:
    """Rows with ``per_row`` random columns each, on the two sides of a random plane; a share of targets is wrong."""
    random = np.random.default_rng(seed)
    width = columns // per_row  # a row has one column of each part, so none twice
    parts = np.arange(per_row, dtype=np.int32) * np.int32(width)
    indices = random.integers(0, width, (rows, per_row), dtype=np.int32) + parts
    values = random.standard_normal((rows, per_row), dtype=np.float32)
    plane = np.random.default_rng([seed, 1]).standard_normal(columns, dtype=np.float32)
    targets = np.where((values * plane[indices]).sum(1) > 0, np.float32(1), np.float32(-1))
    targets[random.random(rows) < flipped] *= -1
    return LibsvmRows(
        targets=targets,
        indptr=np.arange(0, rows * per_row + 1, per_row, dtype=np.int64),
        indices=indices.ravel(),
        values=values.ravel(),
        columns=columns,
    )


def first_rows(data: LibsvmRows, count: int) -> tuple[LibsvmRows, LibsvmRows]:
    """The first rows and the others, as views."""
    cut = int(data.indptr[count])
    first = LibsvmRows(
        data.targets[:count], data.indptr[: count + 1], data.indices[:cut], data.values[:cut], data.columns
    )
    rest = data.indptr[count:] - cut
    return first, LibsvmRows(data.targets[count:], rest, data.indices[cut:], data.values[cut:], data.columns)


def low_rank(seed: int, *, users: int, items: int, entries: int, rank: int = 5, noise: float = 0.1) -> RatingEntries:
    """Random entries of a matrix of low rank, with noise; the entries' deviation is about 1."""
    random = np.random.default_rng(seed)
    left = random.standard_normal((users, rank), dtype=np.float32) / np.float32(rank**0.25)
    right = random.standard_normal((items, rank), dtype=np.float32) / np.float32(rank**0.25)
    of_user = random.integers(0, users, entries, dtype=np.int32)
    of_item = random.integers(0, items, entries, dtype=np.int32)
    values = _products(left, right, of_user, of_item)
    values += np.float32(noise) * random.standard_normal(entries, dtype=np.float32)
    return RatingEntries(of_user, of_item, values, (users, items))


def first_entries(data: RatingEntries, count: int) -> tuple[RatingEntries, RatingEntries]:
    """The first entries and the others, as views."""
    first = RatingEntries(data.users[:count], data.items[:count], data.values[:count], data.shape)
    return first, RatingEntries(data.users[count:], data.items[count:], data.values[count:], data.shape)


def _products(left: Array, right: Array, of_user: Array, of_item: Array) -> Array:
    """The entries of left times right, a piece at a time: their rows would fill the memory."""
    values = np.empty(len(of_user), np.float32)
    for start in range(0, len(values), 1 << 20):
        part = slice(start, start + (1 << 20))
        values[part] = np.einsum("nk,nk->n", left[of_user[part]], right[of_item[part]])
    return values


def noisy_disc(seed: int, *, side: int, noise: float = 0.6, smoothness: float = 1.0) -> FlowNetwork:
    """A picture of a disc in noise as a network: the smallest cut tells the disc from its surroundings.

    Node 0 is the source, node 1 the sink, and 2 + y * side + x the pixel in row y and column x.
    """
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:side, :side]
    disc = np.hypot(y - side / 2, x - side / 2) < side / 3
    seen = disc + noise * random.standard_normal((side, side))
    near = 2 * (seen - 0.5).ravel()
    pixels = np.arange(2, 2 + side * side, dtype=np.int32).reshape(side, side)
    pairs = [(pixels[:, :-1], pixels[:, 1:]), (pixels[:-1], pixels[1:])]
    tails = np.concatenate([one.ravel() for one, _ in pairs])
    heads = np.concatenate([other.ravel() for _, other in pairs])
    inside, outside = pixels.ravel()[near > 0], pixels.ravel()[near <= 0]
    smooth = np.full(2 * len(tails), smoothness)
    return FlowNetwork(
        nodes=2 + side * side,
        tails=np.concatenate([tails, heads, np.zeros_like(inside), outside]),
        heads=np.concatenate([heads, tails, inside, np.ones_like(outside)]),
        capacities=np.concatenate([smooth, near[near > 0], -near[near <= 0]]),
        source=0,
        sink=1,
    )
