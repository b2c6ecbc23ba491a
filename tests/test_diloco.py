"""DiLoCo: against a loop written by hand, its fragments, and what it shares."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import World
from hypothesis import given
from hypothesis import strategies as st
from joined_batch import adam, backward, copy_for, momentum
from replicas import CASE, plain, train
from same_bits import assert_same
from test_many_resume import WithStatistics
from torch import Tensor, nn
from torch.optim import SGD

import paceline
from paceline.errors import UsageError
from paceline.peers.averaging import Averager, Means
from paceline.policies import DiLoCo, parse_policy

STEPS = 11
EXAMPLES = [  # of each worker in each step; one without data borrows
    [4, 4, 3, 4, 4, 0, 4, 2, 4, 1, 4],
    [4, 0, 3, 4, 0, 0, 4, 1, 4, 4, 4],
    [2, 0, 1, 0, 0, 0, 4, 4, 4, 4, 1],
]
# A policy for real workers, and what is done by hand: averages are outer updates with a rate of 1.
AGAINST_HAND = [
    ("local-sgd(every=3)", DiLoCo(every=3, outer_lr=1.0, outer_momentum=0.0)),
    ("post-local-sgd(every=2, start=0)", DiLoCo(every=2, outer_lr=1.0, outer_momentum=0.0)),
    *(
        (str(policy), policy)
        for policy in (
            DiLoCo(every=1),
            DiLoCo(every=3),
            DiLoCo(every=4, outer_lr=0.3, outer_momentum=0.0),
            DiLoCo(every=5, fragments=3),
            DiLoCo(every=3, fragments=3, overlap=2),
            DiLoCo(every=4, fragments=2, overlap=1, merge=0.0),
            DiLoCo(every=5, overlap=4, merge=0.25),
        )
    ),
]


def batch_of(rank: int, step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + step))


def by_hand(template: nn.Module, policy: DiLoCo, make_optimizer: Any) -> list[list[list[Tensor]]]:
    """The parameters of each worker after each step."""
    models = [copy.deepcopy(template) for _ in EXAMPLES]
    optimizers = [make_optimizer(model) for model in models]
    replicas = [list(model.parameters()) for model in models]
    anchor = [parameter.detach().clone() for parameter in replicas[0]]
    cut = policy.cut([parameter.numel() for parameter in anchor])
    nesterov = policy.outer_momentum > 0
    outer = [
        SGD([anchor[index] for index in part], policy.outer_lr, policy.outer_momentum, nesterov=nesterov)
        for part in cut
    ]
    since = [[0] * len(models) for _ in cut]
    under_way: dict[int, tuple[int, list[Tensor]]] = {}
    found: list[list[list[Tensor]]] = [[] for _ in models]
    for step in range(1, STEPS + 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            examples = EXAMPLES[rank][step - 1]
            optimizer.zero_grad()
            if examples:
                backward(CASE.loss(model, batch_of(rank, step)[:examples]))
            optimizer.step()
            for counts in since:
                counts[rank] += examples
        number = policy.fragment(step)
        if number is not None and any(since[number]):
            weights = torch.tensor(since[number]) / torch.tensor(since[number]).sum()
            changes = [
                torch.stack(
                    [w * (anchor[index] - each[index].detach()) for w, each in zip(weights, replicas, strict=True)]
                )
                for index in cut[number]
            ]
            under_way[step + policy.overlap] = number, [each.sum(0) for each in changes]
            since[number] = [0] * len(models)
        if step in under_way:
            number, changes = under_way.pop(step)
            for index, change in zip(cut[number], changes, strict=True):
                anchor[index].grad = change
            outer[number].step()
            kept = policy.merge if policy.overlap else 0.0
            with torch.no_grad():
                for each in replicas:
                    for index in cut[number]:
                        each[index].copy_(kept * each[index] + (1 - kept) * anchor[index])
        for each, told in zip(replicas, found, strict=True):
            told.append([parameter.detach().clone() for parameter in each])
    return found


@pytest.mark.parametrize("make_optimizer", [momentum, adam])
@pytest.mark.parametrize(("policy", "reference"), AGAINST_HAND)
def test_against_a_loop_by_hand(world: World, policy: str, reference: DiLoCo, make_optimizer: Any) -> None:
    """With uneven batches: changes are weighted by the examples since a fragment's last exchange."""
    template = CASE.build()

    def work(group: Any) -> list[list[Tensor]]:
        model = copy_for(group, template)
        found = []
        with paceline.join(model, make_optimizer(model), policy=policy, group=group) as session:
            for step, examples in enumerate(EXAMPLES[session.rank], 1):
                with session.step(examples=examples):
                    backward(CASE.loss(model, batch_of(session.rank, step)[: examples or 1]))
                found.append([parameter.detach().clone() for parameter in model.parameters()])
        return found

    torch.testing.assert_close(world(3, work), by_hand(template, reference, make_optimizer), rtol=1e-5, atol=1e-6)


@given(sizes=st.lists(st.integers(0, 1000), min_size=1, max_size=40), fragments=st.integers(1, 8))
def test_fragments_hold_each_tensor_once_and_are_about_equal(sizes: list[int], fragments: int) -> None:
    policy = DiLoCo(every=8, fragments=fragments)
    if len(sizes) < fragments:
        with pytest.raises(UsageError, match=f"the {len(sizes)} tensors that the model trains"):
            policy.cut(sizes)
        return
    parts = policy.cut(sizes)
    assert sorted(index for part in parts for index in part) == list(range(len(sizes)))
    totals = [sum(sizes[index] for index in part) for part in parts]
    assert max(totals) - min(totals) <= max(sizes)
    assert all(parts) or 0 in sizes


@given(every=st.integers(1, 50), fragments=st.integers(1, 50), round_=st.integers(0, 5))
def test_each_fragment_is_exchanged_once_a_round_at_even_distances(every: int, fragments: int, round_: int) -> None:
    if fragments > every:
        with pytest.raises(UsageError, match="every must be at least the number of fragments"):
            DiLoCo(every=every, fragments=fragments)
        return
    policy = DiLoCo(every=every, fragments=fragments)
    at = [step for step in range(round_ * every + 1, (round_ + 1) * every + 1) if policy.fragment(step) is not None]
    assert [policy.fragment(step) for step in at] == list(range(fragments))
    assert at[-1] == (round_ + 1) * every
    distances = [b - a for a, b in zip([round_ * every, *at], at, strict=False)]
    assert max(distances) - min(distances) <= 1


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ("every=0", "every must be at least 1"),
        ("every=3, overlap=3", "overlap must be below every, 3"),
        ("every=3, overlap=-1", "overlap must be at least 0"),
        ("every=3, fragments=0", "fragments must be at least 1"),
        ("every=3, merge=1", "merge must be at least 0 and below 1"),
        ("every=3, outer_lr=0", "outer_lr must be above 0"),
        ("every=3, outer_lr=nan", "outer_lr must be above 0"),
        ("every=3, outer_momentum=1", "outer_momentum must be at least 0 and below 1"),
    ],
)
def test_options_that_cannot_be_are_refused(options: str, wanted: str) -> None:
    with pytest.raises(UsageError, match=wanted):
        parse_policy(f"diloco({options})")


@pytest.mark.parametrize("every", [3, 9])
def test_bytes_fall_by_the_factor_and_peaks_by_the_fragments(world: World, every: int) -> None:
    template = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(3)))
    often, seldom, pieces = (
        world(2, lambda group, policy=policy: train(group, template, policy, batch_size=6))[0]["bytes"]  # type: ignore[misc]
        for policy in ("diloco(every=1)", f"diloco(every={every})", f"diloco(every={every}, fragments=3)")
    )
    control = (3 + 2) * 4  # the tag, the weight, whether to stop, and the time of each worker
    assert sum(often) == every * sum(seldom) > 0
    assert 3 * (max(pieces) - control) == max(seldom) - control
    assert sum(pieces) - 2 * control * 9 // every == sum(seldom)


def test_anchor_and_outer_momentum_are_the_same_everywhere(world: World) -> None:
    template = CASE.build()
    found = world(3, lambda group: train(group, template, "diloco(every=3, fragments=2)", make_optimizer=adam))
    shared = [[(place.anchor, place.momentum) for place in each["exchange"]._places] for each in found]
    assert_same(shared[0], shared[1])
    assert_same(shared[0], shared[2])


def test_small_outer_updates_of_halves_add_up(world: World) -> None:
    """Each round moves the anchor by a tenth of what a parameter can hold."""

    def work(group: Any) -> list[float]:
        model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
        nn.init.constant_(model.weight, 1.0)
        policy = "diloco(every=1, outer_lr=0.1, outer_momentum=0)"
        found = []
        with paceline.join(model, SGD(model.parameters(), lr=2**-8), policy=policy, group=group) as session:
            for _ in range(10):
                with session.step():
                    backward(model(torch.ones(1, 1, dtype=torch.bfloat16)).sum())
                found.append(model.weight.item())
        return found

    found = world(2, work)[0]
    assert found[0] == 1.0
    assert found[-1] == 1.0 - 2**-8


def test_a_run_goes_on_with_other_options_from_the_same_anchor(world: World, tmp_path: Path) -> None:
    """The exchange under way when it was saved is given up; what it held is in the next one."""
    template = WithStatistics()
    options: dict[str, Any] = {"run": (run := tmp_path / "run"), "save_every": 1}
    before = world(2, lambda group: train(group, template, "diloco(every=4, overlap=2)", stop=5, **options))

    def resume(group: Any) -> list[Tensor]:
        model = copy_for(group, template)
        policy = "diloco(every=6, fragments=2, outer_lr=0.4)"
        with paceline.join(model, plain(model), policy=policy, group=group, resume=True, run=run) as session:
            return [place.anchor.clone() for place in session._exchange._places]  # type: ignore[attr-defined]

    wanted = [place.anchor for place in before[0]["exchange"]._places]
    for anchor in world(2, resume):
        assert_same(anchor, wanted)


def test_nobody_waits_for_an_exchange_before_it_is_due(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []  # of worker 0
    start, finish = Averager.start, Averager.finish

    def recorded_start(self: Averager, tensors: Any, *, now: bool, **options: Any) -> None:
        calls.extend(["run" if now else "start"] * (self._peers.rank == 0))
        start(self, tensors, now=now, **options)

    def recorded_finish(self: Averager) -> Means:
        calls.extend(["wait"] * (self._peers.rank == 0))
        return finish(self)

    monkeypatch.setattr(Averager, "start", recorded_start)
    monkeypatch.setattr(Averager, "finish", recorded_finish)

    def work(group: Any) -> None:
        model = nn.Linear(1, 1)
        with paceline.join(model, plain(model), policy="diloco(every=4, overlap=2)", group=group) as session:
            for step in range(1, 7):
                calls.extend([step] * (session.rank == 0))
                with session.step():
                    backward(model(torch.ones(1, 1)).sum())

    world(2, work)
    assert calls == [1, 2, 3, 4, "start", 5, 6, "wait", "run", "wait"]  # the last are the average at the end
