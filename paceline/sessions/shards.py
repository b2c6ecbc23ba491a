"""Several servers: the first starts the others, each of which holds a part of the model until the run ends."""

from __future__ import annotations

import signal

from paceline.interrupts import answered
from paceline.launch.environment import ServerAssignment
from paceline.server.shard_server import ShardServer
from paceline.server.shards import Shards
from paceline.store.commit_rule import CommitRule
from paceline.train_state import TrainState
from paceline.transport.listening import Listener


def open_shards(
    train_state: TrainState, assignment: ServerAssignment, *, workers: int, version: int, rule: CommitRule, found: bool
) -> Shards | None:
    """Start the other servers of the run, if it has any; ``found``: from the memory of killed ones."""
    if not assignment.shard_fds:
        return None
    return Shards(
        train_state,
        memories=assignment.shard_fds,
        addresses=[assignment.shard_address(shard) for shard in range(1, 1 + len(assignment.shard_fds))],
        token=bytes.fromhex(assignment.token),
        workers=workers,
        version=version,
        rule=rule,
        found=found,
    )


def serve_shard(train_state: TrainState, assignment: ServerAssignment) -> int:
    """Run one of the other servers until the first ends; return the exit code of the process."""
    caught: list[int] = []
    listener = Listener(bytes.fromhex(assignment.token), trusted=assignment.trusted)
    # A signal goes to all processes of a run. The first server then saves, and needs the others for it.
    with answered(lambda number, _: caught.append(number), signal.SIGINT, signal.SIGTERM):
        try:
            listener.bind(assignment.shard_address(assignment.shard))
            bind = assignment.shard_bind(assignment.shard)
            server = ShardServer(
                train_state,
                shard=assignment.shard,
                servers=1 + len(assignment.shard_fds),
                file=assignment.shard_fds[assignment.shard - 1],
                listener=listener,
                address=listener.bind(f"tcp://{bind}") if bind is not None else None,
            )
            server.serve(lambda: bool(caught))
        finally:
            listener.close()
    return 128 + caught[0] if caught else 0
