"""Train one PyTorch model on many workers; how they keep pace with each other is a value you pass in."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paceline import policies
from paceline.collectives.register import register
from paceline.policies import *  # noqa: F403  # they import nothing slow
from paceline.version import __version__

if TYPE_CHECKING:
    from paceline.data.sampler import ShardedSampler
    from paceline.errors import (
        CheckpointError,
        CommError,
        NonFiniteLossError,
        PacelineError,
        RunInUseError,
        UsageError,
    )
    from paceline.peers.ddp import DistributedDataParallel
    from paceline.problems import Metric, Problem, Recipe
    from paceline.sessions.session import Session, Step, join
    from paceline.sessions.timing import Timing

__all__ = [
    "CheckpointError",
    "CommError",
    "DistributedDataParallel",
    "Metric",
    "NonFiniteLossError",
    "PacelineError",
    "Problem",
    "Recipe",
    "RunInUseError",
    "Session",
    "ShardedSampler",
    "Step",
    "Timing",
    "UsageError",
    "__version__",
    "join",
]
__all__ += policies.__all__

# Names are looked up on first use: the command and the supervisor start in an instant, without torch's seconds.
_HOMES = {
    "paceline.data.sampler": ["ShardedSampler"],
    "paceline.errors": [name for name in __all__ if name.endswith("Error")],
    "paceline.peers.ddp": ["DistributedDataParallel"],
    "paceline.problems": ["Metric", "Problem", "Recipe"],
    "paceline.sessions.session": ["Session", "Step", "join"],
    "paceline.sessions.timing": ["Timing"],
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


register()
