"""The first server's control of the other servers, each of which holds a part of the parameters.

The first server decides, and the others carry out its orders one after the other. So commits and sending of parameters
have the same order on all servers. A worker goes on only when all servers have answered.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from paceline.errors import CommError, WireError
from paceline.server.shard_server import TIME_TO_BE_ENDED
from paceline.store.commit_rule import CommitRule
from paceline.store.gathering import adopt
from paceline.store.layout import ModelLayouts
from paceline.store.memory import SharedMemory
from paceline.store.partition import bits_of, layouts_of, starts_of
from paceline.store.pending import PushKey, Share
from paceline.store.shard_state import collect_state, drop_state, norms_of, read_rows, total_norm, write_state
from paceline.train_state import TrainState
from paceline.transport import messages as wire
from paceline.transport.calling import call
from paceline.transport.connections import Connection
from paceline.transport.wire import decode, encode

_TIME_TO_COME = 60.0  # seconds until a server has run the script up to join()
_TIME_TO_END = 1.0
_TICK = 0.5


class _Other:
    """One of the other servers."""

    def __init__(self, number: int, connection: Connection, file: int, memory: SharedMemory) -> None:
        self.number, self._connection, self.file, self.memory = number, connection, file, memory
        self.awaited = 0  # answers not received yet
        self.answer = wire.Done(0)  # the last answer
        self.remote_address = ""

    def send(self, order: Any) -> None:
        self._connection.send(encode(order))
        self.awaited += 1

    def wait(self) -> None:
        """Wait until this server has carried out every order."""
        while self.awaited:
            self._connection.flush()
            received = self._connection.receive()
            if received is None:
                if self._connection.ended:
                    raise _gone(f"server {self.number}, which holds a part of the parameters, is gone")
                self._connection.wait(_TICK)
                continue
            message = decode(received.head)
            if isinstance(message, wire.Refused):
                raise CommError(f"server {self.number} refused an order: {message.reason}")
            assert isinstance(message, wire.Done), f"server {self.number} answered an order by {message}"
            self.answer = message
            self.awaited -= 1

    def close(self) -> None:
        self._connection.close(_TIME_TO_END)


class Shards:
    """Start the servers at ``addresses``; each shares one of the ``memories`` with this process and the workers.

    The parameters of ``train_state`` are then in those memories, so that its model is always complete. Its optimizers
    have state for this server's part only. ``found``: the servers replace killed ones, whose state of ``version`` is in
    the memories.
    """

    def __init__(
        self,
        train_state: TrainState,
        *,
        memories: Sequence[int],
        addresses: Sequence[str],
        token: bytes,
        workers: int,
        version: int,
        rule: CommitRule,
        found: bool = False,
    ) -> None:
        self._train_state, self.addresses, self._clip_norm = train_state, tuple(addresses), train_state.clip_norm
        self._layouts = layouts_of(train_state.model, 1 + len(memories), with_reads=rule.with_reads)
        self._starts = starts_of(self._layouts)
        self.num_trained = self._starts[-1]
        self.up_bytes, self.down_bytes = (
            sum(layout.nbytes for layout in sizes)
            for sizes in ([each.up for each in self._layouts], [each.down for each in self._layouts])
        )
        self._orders = 0
        self._pairs = 0  # of pushes that were compared last
        self._undecided = False  # the others do not know yet that their last commit counts
        self._others: list[_Other] = []
        for number, (layouts, file, address) in enumerate(zip(self._layouts[1:], memories, addresses, strict=True), 1):
            memory = SharedMemory(file, down=layouts.down.nbytes, up=layouts.up.nbytes, slots=workers, create=True)
            try:
                connection = call(address, token, sealed=False, seconds=_TIME_TO_COME)
            except CommError as error:
                raise _gone(str(error)) from None
            self._others.append(_Other(number, connection, file, memory))
        self._begin(version, workers, rule, found=found)
        self.remote_addresses = tuple(other.answer.result.decode() for other in self._others)

    def _begin(self, version: int, workers: int, rule: CommitRule, *, found: bool) -> None:
        number, lengths = self._number(), [0] * len(self._others)
        if not found:
            for other, part in self._parts():
                adopt(part, other.memory.down)
            lengths = [write_state(other.file, self._train_state, part) for other, part in self._parts()]
            self.drop_collected()
        codec = "" if rule.codec is None else str(rule.codec)
        begin = wire.Begin(number, version, workers, 0, rule.adds_up, str(rule.aggregator), rule.kind.value, codec)
        self._order([begin._replace(state=length) for length in lengths])
        self._wait()
        if found:
            for other, part in self._parts():
                adopt(part, other.memory.down, found=True)

    @property
    def all_layouts(self) -> list[ModelLayouts]:
        """The layouts of all parts."""
        return self._layouts

    @property
    def layouts(self) -> ModelLayouts:
        """The layouts of the first server's own part."""
        return self._layouts[0]

    def _parts(self) -> list[tuple[_Other, ModelLayouts]]:
        return list(zip(self._others, self._layouts[1:], strict=True))

    # Pushes and commits ------------------------------------------------------------------------------------------

    def begin_examining(self, rank: int, step: int, *, shared: bool) -> None:
        """Let the others check their parts of a push."""
        self._order_all(wire.Examine(self._number(), rank, step, shared))

    def end_examining(self) -> tuple[str | None, int]:
        """Name what is not finite in the parts, if anything, and return the sum of their checksums."""
        self._wait()
        amiss = [other.answer.result for other in self._others if other.answer.result]
        if wire.MISSING_PART in amiss:
            raise WireError("a push of which not every server has its part")
        return (amiss[0].decode() if amiss else None), sum(other.answer.value for other in self._others)

    def take(self, key: PushKey, examples: int, used: bytes, *, shared: bool, alone: bool) -> None:
        """Let the others take their parts of a push; unless it is alone in its commit, ``settle`` must follow."""
        number = self._number()
        self._order([wire.Take(number, *key, examples, shared, alone, part) for part in self._bits(used)])

    def settle(self) -> None:
        """Wait until all servers have carried out all orders."""
        self._wait()

    def begin_comparing(self, shares: Sequence[Share]) -> None:
        """Let the others compare their parts of the pushes that count, of which there are at least two."""
        self._choose(shares)
        self._pairs = math.comb(sum(share.weight != 0 for share in shares), 2)
        self._order_all(wire.Compare(self._number()))

    def end_comparing(self) -> list[Tensor]:
        """The rows of the other servers."""
        self._wait()
        return [read_rows(other.file, other.answer.value, self._pairs) for other in self._others]

    def ready(self, version: int, shares: Sequence[Share] = ()) -> None:
        """Let the others combine the gradients of a commit: of these shares, or of all pushes taken."""
        self._choose(shares)
        self._order_all(wire.Ready(self._number(), version))

    def _choose(self, shares: Sequence[Share]) -> None:
        for share in shares:
            self._order_all(wire.Choose(self._number(), *share.push, share.weight))

    def update(self, version: int) -> float:
        """Let the others make their parts of the commit; return the norm of all gradients, if it is needed."""
        norm = math.nan
        if self._clip_norm is not None:
            self._wait()
            norm = total_norm([norms_of(self.layouts), *(each.answer.result for each in self._others)], self._layouts)
        self._order_all(wire.Update(self._number(), version, norm))
        self._undecided = True
        return norm

    def decided(self) -> None:
        """Tell the others that the last commit counts, so that they need not keep the state before it."""
        if self._undecided:
            self._order_all(wire.Decided(self._number()))
            self._undecided = False

    def give(self, rank: int, version: int, *, exchanged: bool) -> None:
        """Let the others send a worker of another host their parameters, or what its last push has become."""
        self._order_all(wire.Give(self._number(), rank, version, exchanged))

    def count_bytes(self) -> list[tuple[int, int, int]]:
        """Rank, bytes that came and bytes that went, of every worker at each of the others."""
        self._order_all(wire.CountBytes(self._number()))
        self._wait()
        counted = [json.loads(other.answer.result) for other in self._others]
        return [(int(rank), *numbers) for each in counted for rank, numbers in each.items()]

    # Checkpoints, and the end ------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Copy the whole state into this process's model and optimizers, until ``drop_collected``."""
        self._order_all(wire.Tell(self._number()))
        self._wait()
        for other, part in self._parts():
            collect_state(other.file, other.answer.value, self._train_state)
            for parameter, view in zip(part.parameters, part.down.views(other.memory.down), strict=True):
                if parameter.device.type != "cpu":
                    parameter.data.copy_(view)

    def drop_collected(self) -> None:
        """Remove the other servers' state from this process's optimizers."""
        drop_state(self._train_state, self.layouts)

    def close(self) -> None:
        """End the other servers."""
        number = self._number()
        for other in self._others:
            other.send(wire.End(number))
        for other in self._others:
            other.close()

    # Orders ------------------------------------------------------------------------------------------------------

    def _number(self) -> int:
        self._orders += 1
        return self._orders

    def _bits(self, used: bytes) -> list[bytes]:
        return [bits_of(used, start, stop) for start, stop in zip(self._starts[1:-1], self._starts[2:], strict=True)]

    def _order_all(self, order: Any) -> None:
        self._order([order] * len(self._others))

    def _order(self, orders: Sequence[Any]) -> None:
        for other, order in zip(self._others, orders, strict=True):
            other.send(order)

    def _wait(self) -> None:
        for other in self._others:
            other.wait()


def _gone(reason: str) -> CommError:
    """The error of a lost server; if it was killed, the supervisor ends this process before the error is raised."""
    time.sleep(TIME_TO_BE_ENDED)
    return CommError(reason)
