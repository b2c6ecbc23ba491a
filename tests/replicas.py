"""Trainings under policies that let the workers' parameters differ, and the table of these policies."""

from __future__ import annotations

import time
from typing import Any

import torch
from joined_batch import CASES, backward, copy_for
from test_many_resume import DATA, Broken
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import paceline
from paceline import Session
from paceline.peers.without_locks import WithoutLocks
from paceline.sessions.peers import PeersSession

# Every policy under which replicas differ, at least once; runs of 9 steps end between two exchanges.
REPLICAS = [
    "local-sgd(every=4)",
    "post-local-sgd(every=4, start=2)",
    "ada-comm(every=4, window=2)",
    "diloco(every=4)",
    "diloco(every=5, fragments=2, overlap=3)",
    "sync-easgd",
    "sma",
    "sma(every=4, momentum=0.5)",
    "gossip(topology=ring)",
    "gossip(topology=random-pairs)",
    "hogwild",
    "hogwild-easgd(period=2, alpha=0.3)",
]
CASE = CASES["mlp"]
EPOCHS = 3


def plain(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1)


def train(
    group: Any,
    template: nn.Module,
    policy: str,
    *,
    make_optimizer: Any = plain,
    make_scheduler: Any = lambda _: (),
    stop: int | None = None,
    batch_size: int = 4,
    records: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Train one worker's replica for 9 steps, or until ``stop``; tell its state and its parameters after each step."""
    model = copy_for(group, template)
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer)
    replicas: list[list[Tensor]] = []
    num_bytes: list[int] = []
    session = paceline.join(model, optimizer, scheduler=scheduler, policy=policy, seed=1, group=group, **options)
    assert isinstance(session, PeersSession)
    try:
        with session:
            for (batch,) in session.batches(TensorDataset(DATA), batch_size, epochs=EPOCHS):
                before = session._exchange.num_bytes
                take_turn(session)
                with session.step() as step:
                    loss = CASE.loss(model, batch)
                    if records:
                        step.record(loss=loss)
                    backward(loss)
                replicas.append([parameter.detach().clone() for parameter in model.parameters()])
                num_bytes.append(session._exchange.num_bytes - before)
                if session.steps == stop:
                    raise Broken
    except Broken:
        pass
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "steps": session.steps,
        "replicas": replicas,
        "bytes": num_bytes,
        "exchange": session._exchange,
    }


def take_turn(session: Session) -> None:
    """Where workers share memory, wait for this worker's turn: then a run has one result.

    Its turn is when those of lower rank have made the step that it is about to make, and all others the one before.
    """
    exchange: object = session._exchange if isinstance(session, PeersSession) else None
    while isinstance(exchange, WithoutLocks) and any(
        exchange.steps_of(rank) < session.steps + (rank < session.rank) for rank in range(session.world_size)
    ):
        time.sleep(0)


def agree(found: list[dict[str, Any]]) -> list[int]:
    """The steps after which all workers had the same parameters, to the bit."""
    return [
        step
        for step in range(1, found[0]["steps"] + 1)
        if all(
            torch.equal(a, b)
            for other in found[1:]
            for a, b in zip(found[0]["replicas"][step - 1], other["replicas"][step - 1], strict=True)
        )
    ]
