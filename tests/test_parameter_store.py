"""The store of parameters: what it commits is what an action names, with the weights that it names."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from same_bits import assert_same
from torch import nn
from torch.optim import SGD

from paceline.aggregators import parse_aggregator
from paceline.policies.messages import mean_weights
from paceline.record.state_tree import pack, unpack
from paceline.store.commit_rule import CommitRule
from paceline.store.gathering import adopt
from paceline.store.layout import Arena, ModelLayouts
from paceline.store.parameter_store import ParameterStore
from paceline.store.pending import PushKey, Share
from paceline.train_state import TrainState


class Model(nn.Module):
    """Two parameters of three numbers, a running mean and a count."""

    mean: torch.Tensor
    count: torch.Tensor

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.zeros(3, dtype=dtype))
        self.other = nn.Parameter(torch.zeros(3, dtype=dtype))
        self.register_buffer("mean", torch.zeros(2, dtype=dtype))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


class Stored:
    """A store whose optimizer subtracts the gradient, and pushes that are all one number."""

    def __init__(
        self, *, adds_up: bool, dtype: torch.dtype = torch.float32, momentum: float = 0.0, aggregator: str = "mean"
    ) -> None:
        self.model = Model(dtype)
        rule = CommitRule(adds_up=adds_up, aggregator=parse_aggregator(aggregator))
        self.layouts = ModelLayouts(self.model, with_reads=rule.with_reads)
        memory = torch.zeros(self.layouts.down.nbytes, dtype=torch.uint8)
        adopt(self.layouts, memory)
        optimizer = SGD(self.model.parameters(), lr=1.0, momentum=momentum)
        self.train_state = rule.remembering(TrainState(model=self.model, optimizers=[optimizer]))
        self.store = ParameterStore(self.train_state, self.layouts, memory, rule)
        self.slot = Arena(self.layouts.up, torch.zeros(self.layouts.up.nbytes, dtype=torch.uint8))

    def push(
        self, worker: int, number: float, examples: int = 1, used: bytes = b"\3", *, alone: bool = False
    ) -> PushKey:
        """Push from the one slot that all workers share, so that nothing may depend on it afterwards."""
        for view in self.slot.views[:3]:
            view.fill_(number)
        self.slot.views[3].fill_(worker)
        for view, parameter in zip(self.slot.views[4:], self.layouts.reads, strict=True):
            view.copy_(parameter.detach())
        key = PushKey(worker, step=10 + worker)
        self.store.take(key, self.slot, examples=examples, used=used, alone=alone)
        return key


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("adds_up", [True, False])
@pytest.mark.parametrize(
    "pushes", [[(100.0, 1), (200.0, 512)], [(200.0, 512), (100.0, 1)], [(1e4, 64)] * 8, [(1.0, 3)] * 301]
)
def test_means_are_right_in_every_precision(dtype: torch.dtype, adds_up: bool, pushes: list[tuple[float, int]]) -> None:
    stored = Stored(adds_up=adds_up, dtype=dtype)
    for worker, (number, examples) in enumerate(pushes):
        stored.push(worker, number, examples)
    stored.store.combine()
    wanted = sum(number * examples for number, examples in pushes) / sum(examples for _, examples in pushes)
    gradient = stored.model.one.grad
    assert gradient is not None and gradient.dtype == dtype
    assert float(gradient[0]) == pytest.approx(wanted, rel=0.01)


@given(data=st.data())
def test_any_subset_with_any_weights_is_committed_and_the_rest_waits(data: st.DataObject) -> None:
    """Against sums in numpy, over several commits."""
    stored, waiting, wanted = Stored(adds_up=False), dict[PushKey, float](), np.zeros(3)
    number = st.floats(-100, 100, width=32)
    for worker in range(data.draw(st.integers(1, 8))):
        pushed = data.draw(number)
        waiting[stored.push(worker, pushed)] = pushed
        if data.draw(st.booleans()):
            chosen = data.draw(st.lists(st.sampled_from(sorted(waiting)), min_size=1, unique=True))
            shares = [Share(key, data.draw(st.floats(-2, 2, width=32))) for key in chosen]
            stored.store.commit(shares)
            wanted -= sum(share.weight * waiting.pop(share.push) for share in shares)
    np.testing.assert_allclose(stored.model.one.detach().numpy(), wanted, rtol=1e-4, atol=1e-3)
    if waiting:
        stored.store.commit([Share(key, 1.0) for key in waiting])
        np.testing.assert_allclose(
            stored.model.one.detach().numpy(), wanted - sum(waiting.values()), rtol=1e-4, atol=1e-3
        )


@given(pushes=st.lists(st.tuples(st.floats(-9, 9, width=32), st.integers(0, 40)), min_size=1, max_size=6))
def test_adding_up_and_keeping_come_to_the_same_mean(pushes: list[tuple[float, int]]) -> None:
    found = []
    for adds_up in (True, False):
        stored = Stored(adds_up=adds_up)
        keys = [stored.push(worker, *push) for worker, push in enumerate(pushes)]
        weights = mean_weights([examples for _, examples in pushes])
        stored.store.commit([*map(Share, keys, weights)])
        found.append(torch.cat([stored.model.one.detach(), stored.model.mean]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("adds_up", [True, False])
def test_a_push_that_is_alone_is_used_where_it_lies(adds_up: bool) -> None:
    stored = Stored(adds_up=adds_up)
    key = stored.push(3, 2.0, alone=True)
    stored.store.commit([Share(key, 1.0)])
    assert stored.model.one.tolist() == [-2.0] * 3
    assert stored.model.mean.tolist() == [2.0] * 2 and int(stored.model.count) == 3


@pytest.mark.parametrize("adds_up", [True, False])
def test_parameters_that_no_push_used_have_no_gradient(adds_up: bool) -> None:
    stored = Stored(adds_up=adds_up)
    stored.push(0, 1.0, used=b"\0")
    stored.push(1, 1.0, used=b"\2")
    stored.store.combine()
    assert stored.model.one.grad is None and stored.model.other.grad is not None


@pytest.mark.parametrize("adds_up", [True, False])
def test_pushes_without_examples_change_nothing(adds_up: bool) -> None:
    stored = Stored(adds_up=adds_up)
    stored.push(0, math.nan, examples=0)
    stored.store.commit()
    assert stored.model.one.tolist() == [0.0] * 3 and stored.model.mean.tolist() == [0.0] * 2


@pytest.mark.parametrize("adds_up", [True, False])
def test_pushes_without_examples_move_no_momentum(adds_up: bool) -> None:
    stored = Stored(adds_up=adds_up, momentum=0.5)
    stored.push(0, 1.0)
    stored.store.commit()
    stored.push(1, 1.0, examples=0)
    stored.store.commit()
    assert stored.model.one.tolist() == [-1.0] * 3


@pytest.mark.parametrize("adds_up", [True, False])
def test_a_push_without_examples_counts_for_nothing_beside_others(adds_up: bool) -> None:
    stored = Stored(adds_up=adds_up)
    stored.push(0, 1.0, used=b"\1")
    stored.push(1, 7.0, examples=0)
    stored.store.combine()
    assert stored.model.one.grad is not None and stored.model.other.grad is None
    assert stored.model.mean.tolist() == [1.0] * 2 and int(stored.model.count) == 0


@given(
    weights=st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
)
def test_buffers_stay_between_those_pushed_whatever_the_weights(weights: list[float], dtype: torch.dtype) -> None:
    """A variance that weights below 0 make negative is a NaN in the next step."""
    stored = Stored(adds_up=False, dtype=dtype)
    keys = [stored.push(worker, 100.0 + worker) for worker in range(len(weights))]
    stored.store.combine([*map(Share, keys, weights)])
    counted = [100.0 + worker for worker, weight in enumerate(weights) if weight] or [0.0]
    for number in stored.model.mean.tolist():
        assert min(counted) * 0.99 <= number <= max(counted) * 1.01


def test_a_mask_of_infinities_stays_one_under_weights_below_0() -> None:
    stored = Stored(adds_up=False)
    keys = [stored.push(worker, -math.inf) for worker in range(2)]
    stored.store.combine([Share(keys[0], 1.0), Share(keys[1], -0.5)])
    assert stored.model.mean.tolist() == [-math.inf] * 2


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused(weight: float) -> None:
    stored = Stored(adds_up=False)
    key = stored.push(0, 1.0)
    with pytest.raises(AssertionError, match="weights that are finite"):
        stored.store.commit([Share(key, weight)])


def test_buffers_are_a_mean_whatever_the_weights_add_up_to() -> None:
    stored = Stored(adds_up=False)
    keys = [stored.push(0, 1.0), stored.push(1, 3.0)]
    stored.store.commit([Share(key, 0.25) for key in keys])
    assert stored.model.one.tolist() == [-1.0] * 3
    assert stored.model.mean.tolist() == [2.0] * 2 and int(stored.model.count) == 1


def test_a_policy_whose_commits_add_up_may_leave_nothing_out() -> None:
    stored = Stored(adds_up=True)
    keys = [stored.push(0, 1.0), stored.push(1, 3.0)]
    with pytest.raises(AssertionError, match="mean of all pushes taken"):
        stored.store.commit([Share(keys[0], 1.0)])


def test_a_policy_whose_commits_add_up_weighs_by_examples() -> None:
    stored = Stored(adds_up=True)
    keys = [stored.push(0, 1.0), stored.push(1, 3.0)]
    with pytest.raises(AssertionError, match="mean of all pushes taken"):
        stored.store.commit([Share(keys[0], 0.9), Share(keys[1], 0.1)])


@pytest.mark.parametrize("adds_up", [True, False])
def test_what_is_forgotten_is_not_committed(adds_up: bool) -> None:
    stored = Stored(adds_up=adds_up)
    stored.push(0, 5.0)
    stored.store.forget()
    stored.push(1, 1.0)
    stored.store.commit()
    assert stored.model.one.tolist() == [-1.0] * 3


@given(pushes=st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=6), scale=st.floats(0, 2, width=32))
def test_gradients_are_corrected_for_what_has_changed_since_they_were_read(pushes: list[float], scale: float) -> None:
    """All are computed from the first parameters and committed one after the other, against numpy."""
    stored, wanted = Stored(adds_up=False, aggregator=f"delay-compensated(scale={scale})"), np.float64(0.0)
    for worker, number in enumerate(pushes):
        stored.push(worker, number)
    for worker, number in enumerate(pushes):
        stored.store.commit([Share(PushKey(worker, step=10 + worker), 1.0)])
        wanted -= number + scale * number * number * (wanted - 0.0)
        assert stored.model.mean.tolist() == [number] * 2, "buffers are not corrected"
    np.testing.assert_allclose(stored.model.one.detach().numpy(), [wanted] * 3, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@given(numbers=st.lists(st.floats(-1e4, 1e4, width=16), min_size=1, max_size=4))
def test_gradients_of_the_newest_parameters_are_not_corrected(dtype: torch.dtype, numbers: list[float]) -> None:
    found = []
    for aggregator in ("mean", "delay-compensated(scale=2.0)", "delay-compensated(scale=2.0, momentum=0.5)"):
        stored = Stored(adds_up=False, aggregator=aggregator, dtype=dtype)
        for number in numbers:
            stored.store.commit([Share(stored.push(0, number, alone=True), 1.0)])
        found.append(stored.model.one.detach())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@given(
    pushes=st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=6),
    scale=st.floats(0, 2, width=32),
    momentum=st.floats(0, 0.99),
)
def test_a_scale_that_adapts_follows_the_mean_of_the_squares(
    pushes: list[float], scale: float, momentum: float
) -> None:
    """As above, by the equations of DC-ASGD-a."""
    stored = Stored(adds_up=False, aggregator=f"delay-compensated(scale={scale}, momentum={momentum})")
    wanted, mean_square = np.float64(0.0), 0.0
    for worker, number in enumerate(pushes):
        stored.push(worker, number)
    for worker, number in enumerate(pushes):
        stored.store.commit([Share(PushKey(worker, step=10 + worker), 1.0)])
        mean_square = momentum * mean_square + (1 - momentum) * number**2
        wanted -= number + scale / math.sqrt(mean_square + 1e-7) * number * number * (wanted - 0.0)
    np.testing.assert_allclose(stored.model.one.detach().numpy(), [wanted] * 3, rtol=1e-3, atol=1e-3)


REMEMBERING = "delay-compensated(scale=2.0, momentum=0.75)"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@given(numbers=st.lists(st.floats(-2, 2, width=16), min_size=2, max_size=6), saved_after=st.integers(0, 6))
def test_what_an_aggregator_remembers_is_saved_and_loaded(
    dtype: torch.dtype, numbers: list[float], saved_after: int
) -> None:
    def commit(stored: Stored, worker: int) -> None:
        """Of a gradient that is one commit old."""
        key = stored.push(worker, numbers[worker])
        stored.model.one.data.add_(0.5)
        stored.store.commit([Share(key, 1.0)])

    undisturbed, first, second = (Stored(adds_up=False, dtype=dtype, aggregator=REMEMBERING) for _ in range(3))
    for worker in range(len(numbers)):
        commit(undisturbed, worker)
        commit(first if worker < saved_after else second, worker)
        if worker + 1 == saved_after:
            tree, tensors = pack(first.train_state.state_dict())
            state = unpack(json.loads(json.dumps(tree)), tensors)
            assert second.train_state.mismatch(state) is None
            second.train_state.load_state_dict(state)
            first.model.one.data.fill_(77)  # nothing is shared
            for tensor in first.train_state.holders[-1].state.values():
                tensor["remembered"].fill_(77)
    last = first if len(numbers) < saved_after else second
    assert_same(last.train_state.state_dict(), undisturbed.train_state.state_dict())


def test_a_push_without_gradients_of_a_parameter_leaves_what_is_remembered_of_it() -> None:
    stored = Stored(adds_up=False, aggregator=REMEMBERING)
    stored.store.commit([Share(stored.push(0, 2.0), 1.0)])
    stored.store.commit([Share(stored.push(0, 0.0, used=b"\1"), 1.0)])
    holder = stored.train_state.holders[-1]
    found = [holder.state[parameter]["remembered"].tolist() for parameter in (stored.model.one, stored.model.other)]
    assert found == [[0.75] * 3, [1.0] * 3]


def test_a_run_goes_on_under_another_aggregator() -> None:
    """What one remembers is dropped, or is not there yet."""
    remembering, other = Stored(adds_up=False, aggregator=REMEMBERING), Stored(adds_up=False)
    for stored in (remembering, other):
        stored.store.commit([Share(stored.push(0, 2.0), 1.0)])
    for one, another in ((remembering, other), (other, remembering)):
        state = one.train_state.state_dict()
        assert another.train_state.mismatch(state) is None
        another.train_state.load_state_dict(state)
        another.store.commit([Share(another.push(0, 1.0), 1.0)])


# Aggregators that compare pushes in pairs ----------------------------------------------------------------------------


def test_the_chosen_push_is_taken_as_it_is_with_its_buffers() -> None:
    stored = Stored(adds_up=False, aggregator="krum(faulty=0)")
    keys = [stored.push(worker, number, used=b"\1") for worker, number in enumerate((0.1, 0.3, 900.0, 0.35))]
    shares = [Share(key, 0.25) for key in keys]
    weighed = stored.store.weigh(shares, [stored.store.compare(shares)])
    assert weighed == [Share(key, float(key.worker == 1)) for key in keys]
    stored.store.combine(weighed)
    assert stored.model.one.grad is not None and stored.model.other.grad is None
    number = torch.tensor(0.3)
    assert torch.equal(stored.model.one.grad, number.expand(3)) and torch.equal(stored.model.mean, number.expand(2))
    assert int(stored.model.count) == 1


@pytest.mark.parametrize("aggregator", ["krum(faulty=0)", "geometric-median"])
def test_too_few_pushes_to_compare_change_nothing(aggregator: str) -> None:
    stored = Stored(adds_up=True, aggregator=aggregator, momentum=0.5)
    for numbers in ([1.0], [1.0, 2.0]):
        for worker, number in enumerate(numbers):
            stored.push(worker, number)
        stored.store.commit()
    stored.store.commit([Share(stored.push(0, 1.0), 0.0)])
    assert stored.model.one.tolist() == [0.0] * 3 and stored.model.mean.tolist() == [0.0] * 2
    for worker in range(3):
        stored.push(worker, 2.0, examples=0 if worker == 2 else 1)
    stored.store.commit()
    assert stored.model.one.tolist() == [0.0] * 3, "the third has no examples, and so no weight"


def test_pushes_are_compared_without_their_buffers_and_gaps() -> None:
    stored = Stored(adds_up=True, aggregator="krum(faulty=0)")
    keys = []
    for worker in range(3):
        for flat in stored.slot.flat:
            flat.fill_(100 * worker)
        keys.append(stored.push(worker, float(worker)))
    rows = stored.store.compare([Share(key, 1 / 3) for key in keys])
    assert rows.tolist() == [[3.0, 12.0, 3.0]] * 2
