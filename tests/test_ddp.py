"""The module wrapper: PyTorch's shape, PyTorch's numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import against_torch
import pytest
import torch
from conftest import REPOSITORY, World
from failing import Fails, Mistake
from joined_batch import backward, momentum, one_weight
from quick import over_one_backend
from safetensors.torch import load_file
from same_bits import assert_same
from torch import Tensor, nn

import paceline
from paceline.errors import CommError, UsageError

Wrapped = paceline.DistributedDataParallel
SCRIPT = Path(against_torch.__file__)


def ones_by_rank(group: Any) -> Tensor:
    """An input whose gradient is 1 on worker 0 and 2 on worker 1, so 1.5 in the mean."""
    return torch.full((1, 1), 1.0 + group.rank())


def gradient_of(model: nn.Linear) -> float:
    assert model.weight.grad is not None
    return model.weight.grad.item()


def test_backward_averages(world: World) -> None:
    def work(group: Any) -> float:
        model = one_weight()
        backward(Wrapped(model, process_group=group)(ones_by_rank(group)).sum())
        return gradient_of(model)

    assert world(2, work) == [1.5, 1.5]


def test_parameters_and_buffers_start_as_those_of_worker_0(world: World) -> None:
    def work(group: Any) -> dict[str, Tensor]:
        model = nn.BatchNorm1d(3)
        for tensor in model.state_dict().values():
            tensor.add_(group.rank())
        return dict(Wrapped(model, process_group=group).state_dict())

    first, second = world(2, work)
    assert_same(first, second)
    assert_same(dict(first), dict(nn.BatchNorm1d(3).state_dict()))


@pytest.mark.parametrize("follow", [True, False])
def test_buffers_follow_worker_0_or_not(world: World, follow: bool) -> None:
    def work(group: Any) -> list[Tensor]:
        model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2))
        wrapped = Wrapped(model, process_group=group, broadcast_buffers=follow)
        for _ in range(2):
            backward(wrapped(torch.randn(4, 1) + 5 * group.rank()).sum())
        with torch.no_grad():
            wrapped.eval()(torch.ones(1, 1))
        before = [buffer.clone() for buffer in model.buffers()]
        wrapped.train()(torch.ones(4, 1))  # begins with worker 0's statistics, if told so
        return [*before, *model.buffers()]

    first, second = world(2, work)
    assert torch.equal(first[3], second[3]) == follow
    assert first[5] == second[5] == 3


def test_state_dict_has_the_names_of_the_module_and_comes_back(world: World) -> None:
    def work(group: Any) -> None:
        wrapped = Wrapped(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), process_group=group)
        plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        assert list(wrapped.state_dict()) == list(plain.state_dict())
        wrapped.load_state_dict(plain.state_dict())
        plain.load_state_dict(wrapped.state_dict())
        assert_same(dict(wrapped.module.state_dict()), dict(plain.state_dict()))

    world(2, work)


def test_a_wrapper_inside_another_module_comes_back_too(world: World) -> None:
    def work(group: Any) -> None:
        outer = nn.ModuleDict({"net": Wrapped(one_weight(), process_group=group), "head": one_weight()})
        state = {name: value + 1 for name, value in outer.state_dict().items()}
        outer.load_state_dict(state)
        assert_same(dict(outer.state_dict()), state)

    world(2, work)


def test_parameters_are_those_of_the_module(world: World) -> None:
    def work(group: Any) -> None:
        module = nn.Sequential(one_weight(), one_weight())
        wrapped = Wrapped(module, process_group=group)
        assert wrapped.module is module
        assert list(wrapped.parameters()) == list(module.parameters())
        optimizer = momentum(wrapped)
        before = [parameter.clone() for parameter in module.parameters()]
        backward(wrapped(torch.ones(1, 1)).sum())
        optimizer.step()
        assert not any(map(torch.equal, before, module.parameters()))

    world(2, work)


def test_arguments_and_results_pass_through(world: World) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = one_weight()

        def forward(self, first: Tensor, *, scale: float) -> dict[str, Any]:
            return {"out": self.layer(first) * scale, "scale": scale}

    def work(group: Any) -> float:
        model = Odd()
        results = Wrapped(model, process_group=group)(ones_by_rank(group), scale=2.0)
        backward(results["out"].sum())
        assert results["scale"] == 2.0
        return gradient_of(model.layer)

    assert world(2, work) == [3.0, 3.0]


def test_no_sync_keeps_gradients_at_home_until_the_next_pass(world: World) -> None:
    def work(group: Any) -> list[float]:
        model = one_weight()
        wrapped = Wrapped(model, process_group=group)
        found = []
        with wrapped.no_sync():
            backward(wrapped(ones_by_rank(group)).sum())
            found.append(gradient_of(model))
            with wrapped.no_sync():
                backward(wrapped(ones_by_rank(group)).sum())
            backward(wrapped(ones_by_rank(group)).sum())
        found.append(gradient_of(model))
        backward(wrapped(ones_by_rank(group)).sum())
        found.append(gradient_of(model))
        return found

    assert world(2, work) == [[1.0, 3.0, 6.0], [2.0, 6.0, 6.0]]


def no_grad(wrapped: Wrapped) -> None:
    with torch.no_grad():
        wrapped(torch.ones(1, 1))


def evaluation(wrapped: Wrapped) -> None:
    wrapped.eval()
    no_grad(wrapped)
    wrapped.train()


@pytest.mark.parametrize("between", [no_grad, evaluation])
def test_passes_without_gradients_exchange_nothing_and_disturb_nothing(
    world: World, between: Callable[[Wrapped], None]
) -> None:
    """Worker 0 alone makes them: between the steps, and between a forward and its backward."""

    def work(group: Any) -> list[float]:
        model = one_weight()
        wrapped = Wrapped(model, process_group=group)
        found = []
        for _ in range(3):
            if group.rank() == 0:
                between(wrapped)
            model.zero_grad()
            out = wrapped(ones_by_rank(group)).sum()
            if group.rank() == 0:
                between(wrapped)
            backward(out)
            found.append(gradient_of(model))
        return found

    assert world(2, work) == [[1.5] * 3] * 2


def test_training_in_eval_mode_averages_as_pytorch_does(world: World) -> None:
    def work(group: Any) -> float:
        model = one_weight()
        backward(Wrapped(model, process_group=group).eval()(ones_by_rank(group)).sum())
        return gradient_of(model)

    assert world(2, work) == [1.5, 1.5]


def test_a_second_backward_on_the_same_pass_is_refused(world: World) -> None:
    def work(group: Any) -> None:
        out = Wrapped(one_weight(), process_group=group)(torch.ones(1, 1)).sum()
        torch.autograd.backward(out, retain_graph=True)
        with pytest.raises(UsageError, match="second backward"):
            backward(out)

    world(2, work)


@over_one_backend
@pytest.mark.usefixtures("overlapping")
def test_half_an_exchange_is_not_followed_by_another(world: World) -> None:
    """Worker 1 fails in the midst of backward, catches it and goes on: worker 0 still waits for the other half."""

    class Model(nn.Sequential):
        fails = False

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self[0](inputs)
            if self.fails:
                hidden = Fails.apply(hidden)  # type: ignore[no-untyped-call]
            out: Tensor = self[1](hidden)
            return out

    def work(group: Any) -> None:
        model = Model(one_weight(), one_weight())
        model.fails = group.rank() == 1
        wrapped = Wrapped(model, bucket_cap_mb=0, process_group=group)
        with pytest.raises(Mistake if group.rank() == 1 else CommError):
            backward(wrapped(torch.ones(1, 1)).sum())
        with pytest.raises(CommError, match="resume"):
            wrapped(torch.ones(1, 1))

    world(2, work, timeout=2)


def test_one_worker_is_enough(world: World) -> None:
    def work(group: Any) -> float:
        model = one_weight()
        wrapped = Wrapped(model, process_group=group)
        backward(wrapped(torch.full((1, 1), 3.0)).sum())
        return gradient_of(model)

    assert world(1, work) == [3.0]


# Against PyTorch's own, in processes --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """What two workers wrote down that torchrun started."""
    directory = tmp_path_factory.mktemp("against-torch")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [*torchrun, str(SCRIPT), str(directory)]
    ended = subprocess.run(command, capture_output=True, timeout=200, check=False, env=environment, text=True)
    assert ended.returncode == 0, ended.stderr
    return [load_file(directory / f"{rank}.safetensors") for rank in (0, 1)]


@pytest.mark.sampled(3)
@pytest.mark.processes
@pytest.mark.parametrize("case", against_torch.CASES)
def test_the_same_as_pytorch(results: list[dict[str, Tensor]], case: str) -> None:
    worker_0, worker_1 = results
    names = [name for name in worker_0 if name.startswith(f"ours/{case}/")]
    assert len(names) > 2
    for name in names:
        ours, theirs = worker_0[name], worker_0[name.replace("ours/", "torch/")]
        distance = torch.linalg.vector_norm(ours.double() - theirs.double())
        assert distance <= 1e-6 * torch.linalg.vector_norm(theirs.double()), name
        if "running" not in name:
            assert_same(worker_1[name], ours)


@pytest.mark.processes
def test_a_session_joins_what_torchrun_started(results: list[dict[str, Tensor]]) -> None:
    first, second = ({name: worker[name] for name in worker if name.startswith("session/")} for worker in results)
    assert_same(first, second)
    assert [first[f"session/{name}"].item() for name in ("workers", "steps")] == [2, 8]
