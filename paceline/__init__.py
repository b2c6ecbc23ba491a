"""Train one PyTorch model on many workers, where how they keep pace with each other is a value you pass in."""

from paceline.data.sampler import ShardedSampler
from paceline.errors import (
    CheckpointError,
    NonFiniteLossError,
    PacelineError,
    RunInUseError,
    UsageError,
)
from paceline.policies import POLICIES, AllReduce, PeersPolicy, Policy, parse_policy
from paceline.problems import Metric, Problem, Recipe
from paceline.session import Session, Step, join
from paceline.version import __version__

__all__ = [
    "POLICIES",
    "AllReduce",
    "CheckpointError",
    "Metric",
    "NonFiniteLossError",
    "PacelineError",
    "PeersPolicy",
    "Policy",
    "Problem",
    "Recipe",
    "RunInUseError",
    "Session",
    "ShardedSampler",
    "Step",
    "UsageError",
    "__version__",
    "join",
    "parse_policy",
]
