"""The arguments of ``join()`` as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from paceline.codecs import Codec
from paceline.launch.environment import ServerAssignment
from paceline.policies import Policy
from paceline.sessions.nan_guard import OnNaN
from paceline.train_state import TrainState


@dataclass(frozen=True, kw_only=True)
class JoinRequest:
    """The checked arguments of ``join()``, and the role that the launcher has given to this process."""

    train_state: TrainState
    model: nn.Module  # the module that the user calls; a compiled one wraps that of the train state
    policy: Policy
    codec: Codec | None
    assignment: ServerAssignment | None  # None if the process was not started by Paceline
    group: Any
    seed: int | None
    run: Path | None
    resume: bool | str | Path
    save_every: int | None
    keep: int
    log_every: int
    on_nan: OnNaN
    config: Mapping[str, Any]
