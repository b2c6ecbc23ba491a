"""Synchronisation policies as values: one small file per idea, one table from name to class."""

from __future__ import annotations

from paceline.errors import UsageError
from paceline.policies.ada_comm import AdaComm
from paceline.policies.ada_sync import AdaSync
from paceline.policies.all_reduce import AllReduce
from paceline.policies.base import PeersPolicy, Policy
from paceline.policies.diloco import DiLoCo
from paceline.policies.downpour import Downpour
from paceline.policies.draco import Draco
from paceline.policies.easgd import EASGD
from paceline.policies.elastic import SMA, ElasticPolicy, ElasticRule, SyncEASGD
from paceline.policies.gather import Async, KAsync, KBatchAsync, KBatchSync, KSync, Sync
from paceline.policies.gossip import Gossip
from paceline.policies.gradient_coding import GradientCoding
from paceline.policies.local_sgd import LocalSGD
from paceline.policies.periodic import Periodic
from paceline.policies.post_local_sgd import PostLocalSGD
from paceline.policies.progress import Progress
from paceline.policies.server import ServerPolicy
from paceline.policies.sparse import Atomic, Average, Cyclades, Hogwild, Locked, RoundRobin, Serial, SparsePolicy
from paceline.policies.ssp import SSP
from paceline.spec import from_spec

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
    "Cyclades",
    "DiLoCo",
    "Downpour",
    "Draco",
    "ElasticPolicy",
    "ElasticRule",
    "Gossip",
    "GradientCoding",
    "Hogwild",
    "KAsync",
    "KBatchAsync",
    "KBatchSync",
    "KSync",
    "LocalSGD",
    "Locked",
    "PeersPolicy",
    "Periodic",
    "Policy",
    "PostLocalSGD",
    "Progress",
    "RoundRobin",
    "Serial",
    "ServerPolicy",
    "SparsePolicy",
    "Sync",
    "SyncEASGD",
    "parse_policy",
]

_PEERS: tuple[type[PeersPolicy], ...] = (
    AllReduce,
    LocalSGD,
    PostLocalSGD,
    AdaComm,
    DiLoCo,
    SyncEASGD,
    SMA,
    Gossip,
)
_SERVER: tuple[type[ServerPolicy], ...] = (
    Sync,
    KSync,
    KBatchSync,
    Async,
    KAsync,
    KBatchAsync,
    SSP,
    AdaSync,
    Downpour,
    GradientCoding,
    EASGD,
    Draco,
)
_SPARSE: tuple[type[SparsePolicy], ...] = (Serial, Hogwild, Atomic, Locked, RoundRobin, Average, Cyclades)
POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (*_PEERS, *_SERVER, *_SPARSE)}


def parse_policy(policy: str | Policy) -> Policy:
    """Read a policy from text, such as ``"all-reduce(overlap=false)"``; a ``Policy`` is returned as it is.

    >>> parse_policy("all-reduce(overlap=false)")
    AllReduce(bucket_cap_mb=25.0, first_bucket_mb=1.0, overlap=False)
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str) and policy:
        return from_spec("policy", POLICIES, policy)
    raise UsageError(f"wanted a policy or its text form, got {policy!r}; for example policy={AllReduce.name!r}")
