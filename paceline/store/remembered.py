"""What an aggregator remembers of each parameter, on the server."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.train_state import parameters_of

_NAME = "remembered"


class Remembered(Optimizer):
    """A tensor for each parameter, as the state of an optimizer that never steps.

    So checkpoints, the double buffer and several servers treat it as they treat the state of the others.
    """

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def of(self, parameter: Tensor) -> Tensor:
        """What is remembered of a parameter: real numbers in at least single precision, at first 0."""
        state = self.state[parameter]
        if _NAME not in state:
            precision = torch.promote_types(parameter.dtype, torch.float32).to_real()
            state[_NAME] = torch.zeros(parameter.shape, dtype=precision)
        found: Tensor = state[_NAME]
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state as it was; torch would give it the precision of the parameters."""
        super().load_state_dict(state_dict)
        for number, parameter in enumerate(parameters_of(self)):
            for name, value in state_dict["state"].get(number, {}).items():
                self.state[parameter][name] = value.clone()
