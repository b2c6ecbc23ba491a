"""Several servers: the first brings the others up, each of which holds a part of the model until the run ends."""

from __future__ import annotations

import signal
from typing import NoReturn

from paceline.interrupts import answered
from paceline.launch.environment import ServerPlace
from paceline.server.listening import Listener
from paceline.server.shard_server import ShardServer
from paceline.server.shards import Shards
from paceline.trainee import Trainee


def open_shards(trainee: Trainee, place: ServerPlace, *, workers: int, version: int, found: bool) -> Shards | None:
    """Bring up the other servers of the run, if it has any; ``found``: with what the ones before have left behind."""
    if not place.shard_fds:
        return None
    return Shards(
        trainee,
        memories=place.shard_fds,
        addresses=[place.shard_address(shard) for shard in range(1, 1 + len(place.shard_fds))],
        token=bytes.fromhex(place.token),
        workers=workers,
        version=version,
        found=found,
    )


def serve_shard(trainee: Trainee, place: ServerPlace) -> NoReturn:
    """Be a server beside the first: hold a part until that ends; raises ``SystemExit`` then."""
    caught: list[int] = []
    listener = Listener(bytes.fromhex(place.token), trusted=place.trusted)
    # Signals come to all processes of a run; the first server saves then, for which it needs the others.
    with answered(lambda number, _: caught.append(number), signal.SIGINT, signal.SIGTERM):
        try:
            listener.bind(place.shard_address(place.shard))
            bind = place.shard_bind(place.shard)
            server = ShardServer(
                trainee,
                shard=place.shard,
                servers=1 + len(place.shard_fds),
                file=place.shard_fds[place.shard - 1],
                listener=listener,
                address=listener.bind(f"tcp://{bind}") if bind is not None else None,
            )
            server.serve(lambda: bool(caught))
        finally:
            listener.close()
    raise SystemExit(128 + caught[0] if caught else 0)
