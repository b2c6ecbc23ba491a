"""What a commit is the mean of: weighted by examples, whatever their number, in any dtype."""

from __future__ import annotations

import pytest
import torch
from led_by_hand import Hand, cluster_of_hands
from live import Cluster, Weights
from torch import nn
from torch.optim import SGD

from paceline.train_state import TrainState
from paceline.transport.messages import Warned


def state_of(model: nn.Module) -> TrainState:
    return TrainState(model=model, optimizers=[SGD(model.parameters(), lr=1.0)])


def test_halves_do_not_overflow_on_their_way() -> None:
    """A mean is no larger than its parts, though the sum over examples would be."""
    model = Weights(3).half()
    with Cluster("sync", state_of(model), workers=2) as cluster:
        hands = [Hand(cluster, rank, model=Weights(3).half()) for rank in range(2)]
        for hand in hands:
            hand.ask()
        for hand in hands:
            hand.push(1000.0, examples=512)
        hands[0].go()
        assert cluster.value == -1000.0


@pytest.mark.parametrize("policy", ["sync", "k-batch-async(k=2)"])
def test_no_examples_weigh_nothing(policy: str) -> None:
    with cluster_of_hands(policy, 2) as (cluster, (first, second)):
        first.ask()
        second.ask()
        first.push(5.0, examples=0)
        second.push(3.0, examples=2)
        cluster.until(lambda: len(cluster.host.commits) == 1)
        assert cluster.value == -3.0


def test_a_push_of_no_examples_alone() -> None:
    with cluster_of_hands("async", 1) as (cluster, (hand,)):
        hand.ask()
        hand.push(5.0, examples=0)
        assert (hand.go().version, cluster.value) == (1, 0.0)


def test_buffers_of_no_examples_are_left_alone() -> None:
    model = nn.BatchNorm1d(3)
    with Cluster("async", state_of(model), workers=1) as cluster:
        hand = Hand(cluster, model=nn.BatchNorm1d(3))
        hand.ask()
        hand.push(5.0, 5.0, examples=0)
        hand.go()
    assert model.running_var is not None and model.running_var.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_buffer_that_is_no_longer_finite_is_left_out(value: float) -> None:
    model = nn.BatchNorm1d(3)
    with Cluster("async", state_of(model), workers=1) as cluster:
        hand = Hand(cluster, model=nn.BatchNorm1d(3))
        hand.ask()
        hand.push(1.0, 1.0, value)
        assert hand.hear(Warned).reason.endswith("the gradient of a buffer is not finite; it is left out")
        assert hand.go().version == 0
    assert model.running_mean is not None and model.running_mean.tolist() == [0.0, 0.0, 0.0]


def test_parameters_without_a_gradient() -> None:
    """They count as zeros beside others' gradients, and without any they are left alone by the optimizer."""
    model = Weights(2, 2, 2)
    optimizer = SGD(model.parameters(), lr=1.0, momentum=0.5)
    with Cluster("sync", TrainState(model=model, optimizers=[optimizer]), workers=2) as cluster:
        first, second = (Hand(cluster, rank, model=Weights(2, 2, 2)) for rank in range(2))
        first.ask()
        second.ask()
        first.push(4.0, None, None)
        second.push(None, 2.0, None, examples=3)
        first.go()
        assert [weight[0].item() for weight in model.weights] == [-1.0, -1.5, 0.0]
        assert [weight in optimizer.state for weight in model.weights] == [True, True, False]
