"""The mean of the pushes of a commit, and the tensors that travel."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.errors import UsageError
from paceline.store.gathering import MeanOfPushes, fill_push
from paceline.store.layout import Arena, ModelLayouts


def mean_of(dtype: torch.dtype, pushes: list[tuple[float, int]]) -> float:
    """The mean of pushes that are one number, each with its examples."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(3, dtype=dtype))])
    layouts = ModelLayouts(model)
    gathered = MeanOfPushes(layouts)
    for number, examples in pushes:
        push = Arena(layouts.up, torch.zeros(layouts.up.nbytes, dtype=torch.uint8))
        push.views[0].fill_(number)
        gathered.add(push, examples, b"\1")
    gathered.put()
    gradient = model[0].grad
    assert gradient is not None and gradient.dtype == dtype
    return float(gradient[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "pushes", [[(100.0, 1), (200.0, 512)], [(200.0, 512), (100.0, 1)], [(1e4, 64)] * 8, [(1.0, 3)] * 301]
)
def test_means_are_right_in_every_precision(dtype: torch.dtype, pushes: list[tuple[float, int]]) -> None:
    wanted = sum(number * examples for number, examples in pushes) / sum(examples for _, examples in pushes)
    assert mean_of(dtype, pushes) == pytest.approx(wanted, rel=0.01)


class Replaces(nn.Module):
    """A module whose forward pass puts another tensor in its buffer's place."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self) -> None:
        self.seen = self.seen + 1


def test_buffers_travel_that_were_put_in_others_places() -> None:
    model = Replaces()
    layouts = ModelLayouts(model)
    push = Arena(layouts.up, torch.zeros(layouts.up.nbytes, dtype=torch.uint8))
    model()
    fill_push(layouts, push)
    assert push.views[1].tolist() == [1.0, 1.0]


def test_what_is_unfrozen_later_is_refused() -> None:
    model = Replaces()
    layouts = ModelLayouts(model)
    layouts.check_trained()
    model.weight.requires_grad_(False)
    layouts.check_trained()
    model.frozen.requires_grad_(True)
    with pytest.raises(UsageError, match="frozen was frozen when the session began"):
        layouts.check_trained()
