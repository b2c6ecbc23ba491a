"""Meet the other workers of a run, in the way that its policy says: one table from policy to exchange."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.peers.all_reduce import AllReduceExchange
from paceline.peers.exchange import Alone, Exchange, PeersExchange
from paceline.peers.group import Peers, default_peers
from paceline.peers.local_sgd import LocalSGDExchange
from paceline.policies import AllReduce, LocalSGD, PeersPolicy, Policy


class MakeExchange(Protocol):
    """Make the exchange of a policy for one worker; collective: all workers make theirs together."""

    def __call__(self, model: nn.Module, peers: Peers, policy: Any) -> PeersExchange: ...


EXCHANGES: dict[type[PeersPolicy], MakeExchange] = {AllReduce: AllReduceExchange, LocalSGD: LocalSGDExchange}


def connect(model: nn.Module, policy: Policy, *, group: Any, rank_and_size: tuple[int, int] | None) -> Exchange:
    """Meet the other workers: those of ``group``, or of torch's default one, or nobody.

    ``rank_and_size`` is the rank and the number of workers that a launcher has given to this process.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if group is not None:
        peers = Peers(group, group.rank(), group.size(), device)
    elif rank_and_size is not None or torch.distributed.is_initialized():
        peers = default_peers(device, rank_and_size)
    else:
        return Alone()
    if peers.size == 1:
        return Alone()
    if not isinstance(policy, PeersPolicy):
        raise UsageError(
            f"policy {policy} needs a server, which only Paceline's own launcher starts; "
            f"run the script by: paceline run --workers N --policy '{policy}' script.py"
        )
    return EXCHANGES[type(policy)](model, peers, policy)
