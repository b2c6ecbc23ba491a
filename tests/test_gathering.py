"""The tensors that travel."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.errors import UsageError
from paceline.store.gathering import fill_push
from paceline.store.layout import Arena, ModelLayouts


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
