"""Real gradients on the virtual clock: against loops by hand, bit for bit again, and on the parameters of the past."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.codecs import Parts, parse_codec
from paceline.data.sampler import ShardedSampler
from paceline.errors import UsageError
from paceline.optim import make_optimizer
from paceline.policies import POLICIES, AllReduce, ServerPolicy
from paceline.problems import Metric, Problem, load_problem
from paceline.problems.synthetic import make_quadratic
from paceline.seeding import derive_seed, seed_streams
from paceline.virtual.batches import BatchQueue
from paceline.virtual.plan import TrainingOutcome, TrainingPlan
from paceline.virtual.simulate import Scenario, Simulated
from paceline.virtual.training import ServerTraining, SimulatedTraining, begin_training, simulate_training

SGD = "sgd(lr=0.05, momentum=0.5)"
BATCH = 16


def make_plan(problem: Problem | None = None, **changes: Any) -> TrainingPlan:
    settings: dict[str, Any] = {"optimizer": SGD, "batch_size": BATCH, "points": 4, **changes}
    return TrainingPlan(problem=problem or load_problem("logistic"), **settings)


SIMULATED = sorted(name for name, kind in POLICIES.items() if issubclass(kind, AllReduce | ServerPolicy))


def training(
    policy: str, workers: int, *, seconds: float = 20, problem: Problem | None = None, **options: Any
) -> SimulatedTraining:
    scenario = Scenario(policy=policy, workers=workers, **{"delay": "1", **options})
    return begin_training(scenario, make_plan(problem), seconds=seconds)


def served(policy: str, workers: int, **options: Any) -> ServerTraining:
    run = training(policy, workers, **options)
    assert isinstance(run, ServerTraining)
    return run


def parameters(training: SimulatedTraining) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in training.model.parameters()])


def by_hand(problem: Problem, batch_size: int, steps: int, seed: int = 0) -> Tensor:
    """Train in a plain loop."""
    seed_streams(derive_seed(seed, "model"))
    model = problem.make_model()
    optimizer = make_optimizer(SGD, model.parameters())
    sampler = ShardedSampler(len(problem.train), BATCH, seed=seed)  # type: ignore[arg-type]  # a Dataset with a length
    order = torch.cat([sampler.order(epoch) for epoch in range(9)])
    assert isinstance(problem.train, TensorDataset)
    inputs, targets = problem.train.tensors
    for step in range(steps):
        picked = order[step * batch_size : (step + 1) * batch_size]
        optimizer.zero_grad()
        torch.autograd.backward(problem.loss(model(inputs[picked]), targets[picked]))
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_one_worker_is_the_plain_loop_bit_for_bit() -> None:
    for policy in ("async", "sync", "k-batch-async(k=1)", "all-reduce"):
        one = training(policy, 1)
        one.finish()
        assert torch.equal(parameters(one), by_hand(load_problem("logistic"), BATCH, 20))


@pytest.mark.parametrize("policy", ["sync", "all-reduce", "k-sync(k=4)", "k-async(k=4)", "k-batch-sync(k=4)"])
def test_all_together_are_one_on_the_joined_batch(policy: str) -> None:
    four = training(policy, 4)
    four.finish()
    expected = by_hand(load_problem("logistic"), 4 * BATCH, 20)
    assert torch.allclose(parameters(four), expected, rtol=1e-5, atol=1e-7)


def test_gradients_are_of_the_parameters_as_read() -> None:
    # Two workers, the second twice as slow: its gradients are up to two commits old when they arrive.
    problem = make_quadratic(dim=4, num_examples=64, seed=3)
    assert isinstance(problem.train, TensorDataset)
    centres = problem.train.tensors[0]
    scenario = Scenario(policy="async", workers=2, delay="1 factors(1, 2)")
    found = begin_training(
        scenario, TrainingPlan(problem=problem, optimizer="sgd(lr=0.1)", batch_size=1, points=1), seconds=4
    )
    found.finish()
    order = ShardedSampler(64, 1, seed=0).order(0)
    curvature = torch.logspace(0, -1, 4, base=10.0)
    versions = [torch.zeros(4)]
    # At 1: worker 0. At 2: worker 1 (its batch began first), then worker 0. At 3: worker 0. At 4: both again.
    for batch, read in ((0, 0), (1, 0), (2, 1), (4, 3), (3, 2), (5, 4)):
        gradient = curvature * (versions[read] - centres[order[batch]])
        versions.append(versions[-1] - 0.1 * gradient)
    assert found.outcome().run.staleness_histogram == {0: 2, 1: 3, 2: 1}
    assert torch.allclose(parameters(found), versions[-1], rtol=1e-6)


@pytest.mark.parametrize(
    "name", sorted(name for name, kind in POLICIES.items() if issubclass(kind, AllReduce | ServerPolicy))
)
def test_the_same_seed_gives_the_same_bytes(name: str) -> None:
    needed = {
        "ssp": "bound=1",
        "downpour": "period=2",
        "ada-sync": "window=2",
        "gradient-coding": "stragglers=1",
        "draco": "faulty=1",
    }
    needed["easgd"] = "period=2, alpha=0.4"
    policy = f"{name}({needed[name]})" if name in needed else name
    policy = f"{name}(k=3)" if name.startswith("k-") else policy
    options: dict[str, Any] = {"delay": "1+exp(1)", "problem": dropout_problem()}
    runs = [training(policy, 4, seed=seed, **options) for seed in (5, 5, 6)]
    for run in runs:
        run.finish()
        torch.randn(7)  # what others draw meanwhile does not matter
    first, again, other = runs
    assert torch.equal(parameters(first), parameters(again))
    assert first.outcome() == again.outcome()
    assert not torch.equal(parameters(first), parameters(other))


class Net(nn.Module):
    """Has all that makes a model awkward: dropout, BatchNorm, a frozen layer, a tied one, an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.norm, self.tied, self.unused = nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(2, 2)
        self.last = nn.Linear(8, 1)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.tied(self.tied(self.norm(self.frozen(x))))
        return self.last(self.drop(hidden))  # type: ignore[no-any-return]


def dropout_problem() -> Problem:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(200, 8, generator=generator)
    data = TensorDataset(inputs, inputs.mean(1, keepdim=True))
    mse = torch.nn.functional.mse_loss
    metric = Metric(name="error", measure=mse, higher_is_better=False)
    return Problem(name="awkward", make_model=Net, train=data, test=data, loss=mse, metric=metric)


def test_awkward_models_learn() -> None:
    run = training("k-async(k=2)", 4, seconds=60, problem=dropout_problem())
    before = [buffer.clone() for buffer in run.model.buffers()]
    run.finish()
    curve = run.outcome().curve
    assert curve[-1].loss < 0.5 * curve[0].loss
    after = list(run.model.buffers())
    assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_k_batch_sync_goes_on_with_what_it_has() -> None:
    fast = training("k-batch-sync(k=3)", 2, delay="1 factors(1, 2)", seconds=2)
    fast.finish()
    # At 2: worker 1's first batch and worker 0's second complete the three, all on the first parameters.
    assert fast.outcome().run.staleness_histogram == {0: 3}
    assert torch.allclose(parameters(fast), by_hand(load_problem("logistic"), 3 * BATCH, 1), rtol=1e-5, atol=1e-7)


def test_the_batch_of_a_failed_worker_is_computed_by_another() -> None:
    run = served("k-sync(k=2)", 3, delay="1 fails(worker=1, at=0)", seconds=12, notice=3.0)
    run.finish()
    # Worker 1 is sent batches until it is found out. All are committed, given back, or with the two that are left.
    queue, found = run._work._queue, run.outcome().run
    assert found.pushes == 24 and found.cancelled == 0
    assert queue._next == found.pushes + len(queue._returned) + 2


def test_the_curve_has_its_times() -> None:
    found = simulate_training(Scenario(policy="sync", workers=2, delay="3"), make_plan(points=5), seconds=20)
    assert [point.seconds for point in found.curve] == [0, 4, 8, 12, 16, 20]
    assert [point.commits for point in found.curve] == [0, 1, 2, 4, 5, 6]
    assert found.curve[-1].loss < found.curve[0].loss
    dense = simulate_training(
        Scenario(policy="sync", workers=2, delay="3"), make_plan(points=4, dense_start=True), seconds=16
    )
    assert [point.seconds for point in dense.curve] == [0, 1, 4, 9, 16]


def test_time_to_a_target() -> None:
    problem = load_problem("logistic")
    found = simulate_training(Scenario(policy="async", workers=2, delay="1"), make_plan(problem, points=20), seconds=60)
    reached = found.time_to(problem, 0.8)
    assert reached is not None and 0 < reached < 60
    assert found.time_to(problem, 1.1) is None


def test_adaptive_k_follows_the_loss() -> None:
    problem = make_quadratic(dim=8, num_examples=512, noise=0.05, seed=1)
    scenario = Scenario(policy="ada-sync(k0=1, window=5)", workers=8, delay="exp(1)")
    run = begin_training(scenario, TrainingPlan(problem=problem, optimizer="sgd(lr=0.2)", batch_size=4), seconds=100)
    run.finish()
    assert isinstance(run, ServerTraining)
    assert run._cluster.state.as_dict()["k"] > 3
    assert run.outcome().run.pushes > run.outcome().run.commits


def test_bytes_are_those_of_the_model() -> None:
    run = served("async", 2)
    run.finish()
    assert run._work.nbytes == 4 * 33
    assert run.outcome().run.bytes_in == run.outcome().run.pushes * 4 * 33


def coded(codec: str | None) -> Simulated:
    problem = make_quadratic(dim=4096, num_examples=64, noise=0.05, seed=1)
    plan = TrainingPlan(problem=problem, optimizer="sgd(lr=0.01)", batch_size=4, codec=codec)
    scenario = Scenario(policy="k-sync(k=2)", workers=3, delay="0.01", link="1ms 10Mbit/s")
    return simulate_training(scenario, plan, commits=20).run


def test_with_a_codec_messages_cost_the_bytes_of_their_packets() -> None:
    plain, up, both = (coded(codec) for codec in (None, "sign", "sign(both=true)"))
    state = parse_codec("sign").new_state(Parts.one(4096), seed=0)
    packet = state.encode(torch.randn(4096), step=0).numel()
    assert packet < 4 * 4096 / 25
    assert up.bytes_in % packet == 0 and 40 <= up.bytes_in / packet <= 60, "two of three are committed"
    assert up.bytes_out % (4 * 4096) == 0
    assert (both.bytes_out - 3 * 4 * 4096) % packet == 0, "all parameters, once for each worker"
    assert plain.seconds > 1.2 * up.seconds > 2 * both.seconds


def test_what_is_known_in_the_middle() -> None:
    run = served("async", 2)
    run._cluster.run(commits=3)
    assert run.outcome().run.commits == 3
    assert isinstance(run.outcome(), TrainingOutcome)
    json.dumps(dataclasses.asdict(run.outcome()))


def test_mistakes() -> None:
    with pytest.raises(UsageError, match="batch size must be at least 1"):
        make_plan(batch_size=0)
    with pytest.raises(UsageError, match="LBFGS"):
        begin_training(Scenario(policy="async", workers=2), make_plan(optimizer="lbfgs"), seconds=1)
    with pytest.raises(UsageError, match="seconds must be above 0"):
        training("async", 2, seconds=-1)


# The queue of batches ---------------------------------------------------------------------------------------


@given(deeds=st.lists(st.booleans(), max_size=60), size=st.integers(1, 7))
@settings(max_examples=40)
def test_an_epoch_covers_every_sample_once_whatever_is_given_back(deeds: list[bool], size: int) -> None:
    data = TensorDataset(torch.arange(23), torch.arange(23))
    queue, out = BatchQueue(data, size, seed=1), []
    for give_back in deeds:
        out.append(queue.take())
        if give_back:
            queue.give_back(out.pop(len(out) // 2))
    while out != list(range(len(out))) or len(out) % (-(-23 // size)):
        out = sorted([*out, queue.take()])
    seen = [sample for number in out for sample in queue.fetch(number)[0].tolist()]
    assert sorted(seen) == sorted([*range(23)] * (len(seen) // 23))


def test_any_data_set_will_do() -> None:
    rows = [(torch.tensor([float(n)]), torch.tensor(n)) for n in range(10)]
    inputs, targets = BatchQueue(rows, 4, seed=0).fetch(2)  # type: ignore[arg-type]  # has items and a length
    assert inputs.shape == (2, 1) and targets.tolist() == inputs.flatten().tolist()


@pytest.mark.parametrize("policy", ["sync", "k-batch-async(k=2)", "downpour(period=2)", "all-reduce"])
def test_a_run_may_end_after_commits(policy: str) -> None:
    """Then it is evaluated after as many commits under every policy."""
    scenario = Scenario(policy=policy, workers=3, delay="1+exp(1)")
    counted = begin_training(scenario, make_plan(points=3), commits=10)
    counted.finish()
    found = counted.outcome()
    assert found.run.commits == found.curve[-1].commits == 10
    assert [point.commits for point in found.curve] == [0, 3, 6, 10]
    times = [point.seconds for point in found.curve]
    assert times[0] == 0 and times == sorted(times) and times[-1] == found.run.seconds
    timed = begin_training(scenario, make_plan(points=3), seconds=found.run.seconds)
    timed.finish()
    assert timed.outcome().run.commits == 10
    assert torch.equal(parameters(timed), parameters(counted))
    assert timed.outcome().curve[-1].loss == found.curve[-1].loss
