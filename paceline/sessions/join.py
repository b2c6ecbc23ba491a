"""``join()``: it returns a ``Session``, or makes this process the server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.codecs import Codec, read_codec
from paceline.errors import UsageError
from paceline.launch.environment import asked_codec, asked_policy, asked_probe, take_server_assignment
from paceline.launch.reports import report
from paceline.peers.connect import check_codec
from paceline.policies import Hogwild, PeersPolicy, Policy, ServerPolicy, parse_policy
from paceline.policies.sparse import check_for_module
from paceline.sessions.checks import (
    as_tuple,
    check_for_server,
    check_named,
    check_places,
    check_role,
    check_settings,
    check_train_state,
)
from paceline.sessions.nan_guard import OnNaN
from paceline.sessions.peers import join_peers
from paceline.sessions.probing import join_for_probe
from paceline.sessions.request import JoinRequest
from paceline.sessions.server import host
from paceline.sessions.session import Session
from paceline.sessions.worker import join_as_worker
from paceline.store.commit_rule import CommitRule
from paceline.store.partition import check_dealt
from paceline.train_state import Stateful, TrainState


def join(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    policy: str | Policy | None = None,
    codec: str | Codec | None = None,
    scheduler: LRScheduler | Sequence[LRScheduler] = (),
    scaler: torch.amp.GradScaler | None = None,
    clip_norm: float | None = None,
    seed: int | None = None,
    run: str | Path | None = None,
    resume: bool | str | Path = False,
    save_every: int | None = None,
    keep: int = 3,
    log_every: int = 1,
    on_nan: OnNaN = "stop",
    stateful: Mapping[str, Stateful] | None = None,
    config: Mapping[str, Any] | None = None,
    group: Any = None,
) -> Session:
    """Join the training of ``model`` as one of its workers; alone, unless a launcher started several.

    Under ``paceline run`` a session with a ``run`` ends well by Ctrl-C or SIGTERM: the update under way is made on all
    workers, a checkpoint is written, and then the end of the ``step()`` block (or ``minimize``) raises
    ``KeyboardInterrupt``. A second Ctrl-C ends the run at once. Signals for which the script has a handler are left to
    it. In plain ``python script.py`` Ctrl-C raises where the script is, and the last checkpoint is the one before.

    >>> model = torch.nn.Linear(4, 1)
    >>> with join(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
    ...     for x in session.batches([torch.ones(4)] * 10, batch_size=5, epochs=2):
    ...         with session.step():
    ...             model(x).mean().backward()
    >>> session.steps
    4

    Args:
        policy: how the workers keep pace, such as ``"all-reduce"`` or ``paceline.AllReduce()``; one that was given on
            the launcher's command line goes before it.
        codec: how what the workers exchange becomes fewer bytes, such as ``"top-k(density=0.001)"``; none by default.
            One that was given on the launcher's command line goes before it.
        scheduler: stepped once after every update. One that is stepped otherwise (per epoch, on a metric) is yours
            to step; put it into ``stateful`` to have it saved, or a resumed run starts it anew.
        scaler: steps the optimizers; call ``scaler.scale(loss).backward()`` yourself.
        clip_norm: clip the gradients to this norm before every update. Clipping them yourself, after
            ``backward()`` and inside the step, works too.
        seed: seeds every step's random streams from (seed, worker, step). Without it ``torch.initial_seed()`` of
            worker 0 is taken, and a worker that is alone has its streams left alone, as in a plain loop.
        run: directory for ``config.json``, ``metrics.jsonl`` and checkpoints; nothing is written without one.
        resume: go on from the newest good checkpoint of ``run`` if it has one, or from the checkpoint file named.
        save_every: updates between checkpoints; one is always written when the session ends well.
        keep: how many checkpoints stay.
        log_every: updates between lines of metrics.
        on_nan: what to do when a loss given to ``step.record(loss=...)`` is NaN or infinite.
        stateful: more objects with ``state_dict`` and ``load_state_dict`` to save and resume.
        config: what to put into ``config.json`` beside what the session knows.
        group: the ``torch.distributed`` process group to join; by default the one that the launcher's variables name.
    """
    check_settings(on_nan=on_nan, save_every=save_every, keep=keep, log_every=log_every, seed=seed, clip_norm=clip_norm)
    check_places(run=run, resume=resume, group=group)
    check_named(stateful=stateful, config=config)
    train_state = TrainState(
        # torch.compile wraps the module; names and state are those of the module inside.
        model=getattr(model, "_orig_mod", model),
        optimizers=as_tuple("optimizer", optimizer, Optimizer),
        schedulers=as_tuple("scheduler", scheduler, LRScheduler),
        scaler=scaler,
        clip_norm=clip_norm,
        stateful=dict(stateful or {}),
    )
    check_train_state(train_state)
    policy = parse_policy(asked_policy() or ("all-reduce" if policy is None else policy))
    check_for_module(policy)
    chosen = read_codec(asked_codec() or codec)
    check_codec(policy, chosen)
    assignment = take_server_assignment()
    check_role(policy, assignment)
    return _joiner_of(policy)(
        JoinRequest(
            train_state=train_state,
            model=model,
            policy=policy,
            codec=chosen,
            assignment=assignment,
            group=group,
            seed=seed,
            run=Path(run) if run is not None else None,
            resume=resume,
            save_every=save_every,
            keep=keep,
            log_every=log_every,
            on_nan=on_nan,
            config={**({} if assignment is None else assignment.described()), **(config or {})},
        )
    )


def join_with_server(request: JoinRequest) -> Session:
    """Join a run with a server: as its worker, or as the server, which ends the script with the run."""
    assignment = request.assignment
    if assignment is None or request.group is not None:  # no launcher of ours, so no server; a worker alone needs none
        return join_peers(request)
    report("needs server")  # started with us, or now
    report("joined")  # before others are waited for: then one that never joins is found out
    check_for_server(request.train_state, request.policy, assignment.workers)
    servers = 1 + len(assignment.shard_fds)
    check_dealt(request.train_state.model, servers)  # by whoever comes first
    assert isinstance(request.policy, ServerPolicy)
    CommitRule.of(request.policy, request.codec, servers=servers).check_optimizers(request.train_state)
    if assignment.role == "server":
        raise SystemExit(host(request, assignment))
    return join_as_worker(
        request.train_state,
        request.model,
        assignment,
        policy=request.policy,
        on_nan=request.on_nan,
        run=request.run if assignment.replay is None else None,
    )


def join_equals(request: JoinRequest) -> Session:
    """Join a run without a server; or only a probe before it, which measures how fast it would be."""
    if isinstance(request.policy, Hogwild):
        request.policy.check_processes(1)  # a worker that is alone too
    seconds = asked_probe()
    return join_peers(request) if seconds is None else join_for_probe(request, seconds)


_JOINERS: dict[type[Policy], Callable[[JoinRequest], Session]] = {
    PeersPolicy: join_equals,
    ServerPolicy: join_with_server,
}


def _joiner_of(policy: Policy) -> Callable[[JoinRequest], Session]:
    """The function that joins under a policy of this family."""
    for family, joiner in _JOINERS.items():
        if isinstance(policy, family):
            return joiner
    families = " or a ".join(family.__name__ for family in _JOINERS)
    raise UsageError(f"wanted a policy that is a {families}, found {policy}, a {type(policy).__name__}")
