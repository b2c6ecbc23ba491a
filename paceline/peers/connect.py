"""Connects the workers of a run as its policy says: one table from policy to exchange."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.peers.ada_comm import AdaCommExchange
from paceline.peers.all_reduce import AllReduceExchange
from paceline.peers.diloco import DiLoCoExchange
from paceline.peers.elastic import ElasticExchange
from paceline.peers.exchange import Alone, Exchange, PeersExchange, check_same_model
from paceline.peers.gossip import GossipExchange
from paceline.peers.group import Peers, default_peers
from paceline.peers.hogwild import make_hogwild
from paceline.peers.hogwild_easgd import HogwildEASGDExchange
from paceline.peers.periodic import PeriodicExchange
from paceline.peers.tensors import send_tensors
from paceline.policies import (
    SMA,
    AdaComm,
    AllReduce,
    DiLoCo,
    Gossip,
    Hogwild,
    HogwildEASGD,
    LocalSGD,
    PeersPolicy,
    Policy,
    PostLocalSGD,
    SyncEASGD,
)


class MakeExchange(Protocol):
    """Makes the exchange of a policy for one worker; all workers must call it together."""

    def __call__(self, model: nn.Module, peers: Peers, policy: Any) -> PeersExchange: ...


EXCHANGES: dict[type[PeersPolicy], MakeExchange] = {
    AllReduce: AllReduceExchange,
    LocalSGD: PeriodicExchange,
    PostLocalSGD: PeriodicExchange,
    AdaComm: AdaCommExchange,
    DiLoCo: DiLoCoExchange,
    SyncEASGD: ElasticExchange,
    SMA: ElasticExchange,
    Gossip: GossipExchange,
    Hogwild: make_hogwild,
    HogwildEASGD: HogwildEASGDExchange,
}


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's parameters."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def find_peers(
    device: torch.device, policy: Policy, *, group: Any, rank_and_size: tuple[int, int] | None
) -> Peers | None:
    """The other workers: those of ``group``, or of torch's default group, or none.

    ``rank_and_size`` is this process's rank and the number of workers, from a launcher.
    """
    if group is not None:
        peers = Peers(group, group.rank(), group.size(), device)
    elif rank_and_size is not None or torch.distributed.is_initialized():
        peers = default_peers(device, rank_and_size)
    else:
        return None
    check_processes(policy, peers.size)
    return peers if peers.size > 1 else None


def begin_exchange(model: nn.Module, policy: Policy, peers: Peers | None) -> Exchange:
    """Begin a run: give all workers the parameters of worker 0, raise if one has another model, make the exchange."""
    if peers is not None and isinstance(policy, PeersPolicy):
        check_same_model(model, peers)
        with peers.explain("receiving the parameters of worker 0"):
            for tensor in [*model.parameters(), *model.buffers()]:
                send_tensors([tensor], peers)
    return make_exchange(model, policy, peers)


def make_exchange(model: nn.Module, policy: Policy, peers: Peers | None) -> Exchange:
    """Make the exchange that a policy asks for; all workers must call it together."""
    if peers is None:
        return Alone()
    if not isinstance(policy, PeersPolicy):
        raise UsageError(
            f"policy {policy} needs a server, which only Paceline's own launcher starts; "
            f"run the script with: paceline run --workers N --policy '{policy}' script.py"
        )
    return EXCHANGES[type(policy)](model, peers, policy)


def check_processes(policy: Policy, processes: int) -> None:
    """Raise if the processes cannot be divided among workers as the policy wants it."""
    wanted = policy.processes_per_worker if isinstance(policy, PeersPolicy) else 1
    if processes % wanted:
        raise UsageError(
            f"policy {policy} wants {wanted} processes for each worker, and there are {processes}; start a multiple of "
            f"{wanted}, or let paceline run --policy '{policy}' start them"
        )
