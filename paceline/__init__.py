"""Train one PyTorch model on many workers; how they keep pace with each other is a value you pass in."""

# ruff: noqa: F405  # the policies come by a star import

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paceline.collectives.register import register
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
    from paceline.hogwild.estimators import HogwildClassifier, HogwildRegressor
    from paceline.peers.ddp import DistributedDataParallel
    from paceline.peers.hook import comm_hook
    from paceline.policies import *  # noqa: F403
    from paceline.problems import Metric, Problem, Recipe
    from paceline.sessions.join import join
    from paceline.sessions.session import Session, Step
    from paceline.sessions.timing import Timing

__all__ = [
    "EASGD",
    "POLICIES",
    "SMA",
    "SSP",
    "AdaComm",
    "AdaSync",
    "AllReduce",
    "Async",
    "Atomic",
    "Average",
    "CheckpointError",
    "CommError",
    "Cyclades",
    "DiLoCo",
    "DistributedDataParallel",
    "Downpour",
    "Draco",
    "Gossip",
    "GradientCoding",
    "Hogwild",
    "HogwildClassifier",
    "HogwildEASGD",
    "HogwildRegressor",
    "KAsync",
    "KBatchAsync",
    "KBatchSync",
    "KSync",
    "LocalSGD",
    "Locked",
    "Metric",
    "NonFiniteLossError",
    "PacelineError",
    "PeersPolicy",
    "Policy",
    "PostLocalSGD",
    "Problem",
    "Recipe",
    "RoundRobin",
    "RunInUseError",
    "Serial",
    "ServerPolicy",
    "Session",
    "ShardedSampler",
    "SparsePolicy",
    "Step",
    "Sync",
    "SyncEASGD",
    "Timing",
    "UsageError",
    "__version__",
    "comm_hook",
    "join",
    "parse_policy",
]

# Names are looked up on first use: the command and the supervisor start in an instant, without torch's seconds, and
# torch itself may import us. Those without a home here are policies.
_HOMES = {
    "paceline.data.sampler": ["ShardedSampler"],
    "paceline.errors": [name for name in __all__ if name.endswith("Error")],
    "paceline.hogwild.estimators": ["HogwildClassifier", "HogwildRegressor"],
    "paceline.peers.ddp": ["DistributedDataParallel"],
    "paceline.peers.hook": ["comm_hook"],
    "paceline.problems": ["Metric", "Problem", "Recipe"],
    "paceline.sessions.join": ["join"],
    "paceline.sessions.session": ["Session", "Step"],
    "paceline.sessions.timing": ["Timing"],
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        home = next((home for home, names in _HOMES.items() if name in names), "paceline.policies")
        return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


register()
