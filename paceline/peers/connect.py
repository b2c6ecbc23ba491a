"""Connects the workers of a run as its policy says: one table from policy to exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from paceline.codecs import Codec, Sign, TopK
from paceline.errors import UsageError
from paceline.peers.ada_comm import AdaCommExchange
from paceline.peers.all_reduce import AllReduceExchange
from paceline.peers.coded_reducer import CodedAllReduceExchange
from paceline.peers.coding import Coding
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

    def __call__(self, model: nn.Module, peers: Peers, policy: Any, coding: Coding | None = None) -> PeersExchange: ...


def _all_reduce(model: nn.Module, peers: Peers, policy: AllReduce, coding: Coding | None = None) -> AllReduceExchange:
    if coding is None:
        return AllReduceExchange(model, peers, policy)
    return CodedAllReduceExchange(model, peers, policy, coding)


def _uncoded(make: Callable[[nn.Module, Peers, Any], PeersExchange]) -> MakeExchange:
    """The exchange of a policy under which no codec can be used."""

    def made(model: nn.Module, peers: Peers, policy: Any, coding: Coding | None = None) -> PeersExchange:
        assert coding is None, "refused by check_codec"
        return make(model, peers, policy)

    return made


EXCHANGES: dict[type[PeersPolicy], MakeExchange] = {
    AllReduce: _all_reduce,
    LocalSGD: PeriodicExchange,
    PostLocalSGD: PeriodicExchange,
    AdaComm: AdaCommExchange,
    DiLoCo: DiLoCoExchange,
    SyncEASGD: ElasticExchange,
    SMA: ElasticExchange,
    Gossip: _uncoded(GossipExchange),
    Hogwild: _uncoded(make_hogwild),
    HogwildEASGD: _uncoded(HogwildEASGDExchange),
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


def begin_exchange(model: nn.Module, policy: Policy, peers: Peers | None, codec: Codec | None = None) -> Exchange:
    """Begin a run: give all workers the parameters of worker 0, raise if one has another model, make the exchange."""
    if peers is not None and isinstance(policy, PeersPolicy):
        check_same_model(model, peers)
        with peers.explain("receiving the parameters of worker 0"):
            for tensor in [*model.parameters(), *model.buffers()]:
                send_tensors([tensor], peers)
    return make_exchange(model, policy, peers, codec)


def make_exchange(model: nn.Module, policy: Policy, peers: Peers | None, codec: Codec | None = None) -> Exchange:
    """Make the exchange that a policy asks for; all workers must call it together."""
    if peers is None:
        return Alone()
    if not isinstance(policy, PeersPolicy):
        raise UsageError(
            f"policy {policy} needs a server, which only Paceline's own launcher starts; "
            f"run the script with: paceline run --workers N --policy '{policy}' script.py"
        )
    coding = None if codec is None else Coding(codec, peers)
    return EXCHANGES[type(policy)](model, peers, policy, coding)


def check_codec(policy: Policy, codec: Codec | None) -> None:
    """Raise if what workers exchange under a policy without a server cannot be sent by this codec."""
    if codec is None or not isinstance(policy, PeersPolicy) or isinstance(policy, AllReduce):
        return
    if isinstance(policy, Gossip):
        raise UsageError(
            f"codec {codec} cannot be used under {policy}: a message has the parameters themselves, for another "
            "neighbour than the last, so both ends know nothing that a difference could be sent to; use another policy"
        )
    if policy.shares_memory:
        raise UsageError(f"codec {codec} cannot be used under {policy}: workers share memory, and send nothing")
    corrected = isinstance(codec, TopK) and (codec.momentum or codec.clip)
    if corrected or (isinstance(codec, Sign) and codec.vote == "majority"):
        raise UsageError(
            f"codec {codec} is for gradients, and under {policy} workers send changes of parameters, which momentum, "
            "clipping or a vote would make wrong; leave the option out, or use the policy all-reduce"
        )


def check_processes(policy: Policy, processes: int) -> None:
    """Raise if the processes cannot be divided among workers as the policy wants it."""
    wanted = policy.processes_per_worker if isinstance(policy, PeersPolicy) else 1
    if processes % wanted:
        raise UsageError(
            f"policy {policy} wants {wanted} processes for each worker, and there are {processes}; start a multiple of "
            f"{wanted}, or let paceline run --policy '{policy}' start them"
        )
