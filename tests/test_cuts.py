"""Cuts of flow networks: every choice of sides costs the same in both forms, and rounding finds the best threshold."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.hogwild.cuts import cut_value, round_cut
from paceline.hogwild.problems import GraphCut
from paceline.hogwild.readers import FlowNetwork, read_dimacs
from paceline.hogwild.synthetic import noisy_disc


@st.composite
def networks(draw: st.DrawFn) -> FlowNetwork:
    nodes = draw(st.integers(2, 7))
    arcs = draw(
        st.lists(st.tuples(st.integers(0, nodes - 1), st.integers(0, nodes - 1), st.integers(0, 20)), min_size=1)
    )
    tails, heads, capacities = zip(*arcs, strict=True)
    source, sink = draw(st.permutations(range(nodes)))[:2]
    return FlowNetwork(
        nodes, np.array(tails, np.int32), np.array(heads, np.int32), np.array(capacities, np.float64), source, sink
    )


def all_sides(network: FlowNetwork) -> list[npt.NDArray[np.bool_]]:
    every = itertools.product([False, True], repeat=network.nodes)
    return [each for each in map(np.array, every) if each[network.source] and not each[network.sink]]


@given(networks())
def test_a_cut_costs_the_same_as_the_problem_of_its_arcs(network: FlowNetwork) -> None:
    arcs = (network.tails, network.heads, network.capacities)
    problem = GraphCut.from_arcs(*arcs, network.nodes, network.source, network.sink)
    for sides in all_sides(network):
        apart = sides[problem.tail] != sides[problem.head]
        assert problem.offset + float(problem.weights[apart].sum()) == pytest.approx(cut_value(network, sides))


@given(network=networks(), data=st.data())
def test_rounding_takes_the_best_threshold(network: FlowNetwork, data: Any) -> None:
    x = np.array(data.draw(st.lists(st.floats(0, 1), min_size=network.nodes, max_size=network.nodes)))
    x[network.source], x[network.sink] = 1, 0
    value, sides = round_cut(network, x)
    assert sides[network.source] and not sides[network.sink]
    assert value == cut_value(network, sides)
    x[network.source], x[network.sink] = 2, -1
    assert value == pytest.approx(min(cut_value(network, x > at) for at in x if at < 2))


@given(networks())
def test_a_cut_rounds_to_itself(network: FlowNetwork) -> None:
    best = min(all_sides(network), key=lambda sides: cut_value(network, sides))
    value, _ = round_cut(network, best.astype(np.float64))
    assert value == cut_value(network, best)


def test_a_disc_is_cheaper_to_cut_than_all_pixels_by_themselves() -> None:
    network = noisy_disc(0, side=20)
    y, x = np.mgrid[:20, :20]
    disc = np.concatenate([[True, False], (np.hypot(y - 10, x - 10) < 20 / 3).ravel()])
    alone = np.zeros(network.nodes, bool)
    alone[network.heads[network.tails == network.source]] = True
    alone[network.source] = True
    assert cut_value(network, disc) < cut_value(network, alone)


@pytest.mark.data
def test_the_exact_cut_of_the_tsukuba_pair_has_its_known_value(data_dir: Path) -> None:
    pytest.importorskip("paceline.native._readers", exc_type=ImportError)
    network = read_dimacs(data_dir / "tsukuba" / "tsukuba-nearfar.max.gz")
    pixels = np.unpackbits(np.load(data_dir / "tsukuba" / "tsukuba-nearfar.cut.npy")).astype(bool)
    assert cut_value(network, np.concatenate([[True, False], pixels])) == 50979
