"""PyTorch's own ways to train on many ranks run unmodified on the backend "paceline", and compute what they do on Gloo.

Each program runs twice in real processes; the backend's name is the only difference.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from programs import Launch, launch
from torch import Tensor

from paceline import native

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(1200),  # the first test runs the programs of all, some of which compile
    pytest.mark.skipif(not native.available(), reason="without the compiled module the backend is Gloo itself"),
]

TWO_RANKS = [
    "data_parallel_programs:ddp",
    "sharded_programs:fsdp",
    "collective_programs:functional_collectives",
    "data_parallel_programs:ddp_bucket_views",
    "data_parallel_programs:ddp_unused_parameters",
    "data_parallel_programs:ddp_no_sync",
    "data_parallel_programs:ddp_join",
    "data_parallel_programs:ddp_fp16_hook",
    "data_parallel_programs:ddp_power_sgd_hook",
    "data_parallel_programs:ddp_in_two_groups",
    "data_parallel_programs:ddp_compiled",
    "data_parallel_programs:zero_redundancy",
    "data_parallel_programs:post_local_sgd",
    "sharded_programs:fsdp_bfloat16",
    "sharded_programs:fsdp_full_state",
    "sharded_programs:first_fsdp",
    "sharded_programs:tensor_parallel",
    "sharded_programs:sequence_parallel",
    "sharded_programs:redistributed",
    "pipeline_programs:gpipe",
    "pipeline_programs:one_forward_one_backward",
    "pipeline_programs:interleaved",
    "pipeline_programs:zero_bubble",
    "pipeline_programs:split_by_tracing",
    "checkpoint_programs:save",
    "checkpoint_programs:load",
    "checkpoint_programs:save_asynchronously",
    "collective_programs:gradients_through_collectives",
    "collective_programs:compiled_collectives",
    "collective_programs:objects",
    "collective_programs:ring_of_messages",
]
FOUR_RANKS = [
    "data_parallel_programs:ddp",
    "sharded_programs:hybrid_fsdp",
    "sharded_programs:mesh_of_data_and_tensor",
    "sharded_programs:redistributed",
    "pipeline_programs:one_forward_one_backward",
    "checkpoint_programs:load",  # of what two ranks saved
    "collective_programs:functional_collectives",
    "collective_programs:mesh_axes",
    "collective_programs:ring_of_messages",
]

Launches = dict[str, Launch]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def on_two(directory: Path) -> Launches:
    """What the programs left behind."""
    return {backend: launch(backend, 2, directory / backend, TWO_RANKS) for backend in ("gloo", "paceline")}


@pytest.fixture(scope="module")
def on_four(directory: Path, on_two: Launches) -> Launches:
    return {backend: launch(backend, 4, directory / backend, FOUR_RANKS) for backend in on_two}


@pytest.mark.soak
@pytest.mark.parametrize("program", TWO_RANKS)
def test_two_ranks_compute_the_same_bits(program: str, on_two: Launches) -> None:
    for gloo, ours in zip(on_two["gloo"].results(program), on_two["paceline"].results(program), strict=True):
        assert gloo.keys() == ours.keys()
        assert [name for name in gloo if not torch.equal(gloo[name], ours[name])] == []


@pytest.mark.soak
@pytest.mark.parametrize("program", FOUR_RANKS)
def test_four_ranks_compute_the_same_but_for_the_order_of_additions(program: str, on_four: Launches) -> None:
    for gloo, ours in zip(on_four["gloo"].results(program), on_four["paceline"].results(program), strict=True):
        assert gloo.keys() == ours.keys()
        assert {
            name: _distance(gloo[name], ours[name]) for name in gloo if _distance(gloo[name], ours[name]) > 1e-6
        } == {}


@pytest.mark.soak
def test_a_checkpoint_is_loaded_as_it_was_saved_on_any_number_of_ranks(on_two: Launches, on_four: Launches) -> None:
    saved = on_two["paceline"].results("checkpoint_programs:save")[0]
    loaded = [of_all["paceline"].results("checkpoint_programs:load") for of_all in (on_two, on_four)]
    for rank in loaded[0] + loaded[1]:
        assert rank.keys() == saved.keys()
        assert [name for name in saved if not torch.equal(saved[name], rank[name])] == []


def _distance(wanted: Tensor, found: Tensor) -> float:
    """The norm of the difference, relative to what is wanted."""
    assert wanted.shape == found.shape
    difference = (wanted.double() - found.double()).norm()
    return float(difference / wanted.double().norm()) if difference else 0.0
