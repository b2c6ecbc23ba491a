"""The state of a server policy: its members, their steps, and the pushes not committed yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import repeat
from typing import Any, ClassVar, Self

from paceline.errors import UsageError
from paceline.policies.messages import STEP, Push, Send

NOT_YET = -1  # the incarnation of a worker that is expected and has not joined


@dataclass
class ServerState:
    """The state of a run under a server policy; ``as_dict`` and ``from_dict`` carry it through JSON.

    The server numbers the steps. By its number, the push of a cancelled step or of an earlier incarnation is
    recognised.
    """

    carried: ClassVar[tuple[str, ...]] = ("version", "step")  # fields that survive a restart of all workers

    version: int = 0  # commits so far
    step: int = 0  # the number of the next step to begin
    members: dict[int, int] = field(default_factory=dict)  # worker -> incarnation
    former: dict[int, int] = field(default_factory=dict)  # worker that left -> incarnation
    under_way: dict[int, int] = field(default_factory=dict)  # worker -> its present step
    pending: list[Push] = field(default_factory=list)  # accepted and not committed yet
    waiting: dict[int, None] = field(default_factory=dict)  # members that wait for parameters, in order
    credited: dict[int, None] = field(default_factory=dict)  # workers that left since their pending push

    def join(self, worker: int, incarnation: int) -> None:
        """Add a worker; this ends all steps of its earlier incarnations."""
        last = self.members.get(worker, self.former.get(worker, NOT_YET))
        if incarnation <= last:
            raise UsageError(
                f"worker {worker} joined as incarnation {incarnation}, but incarnation {last} has already joined; "
                f"a worker that comes back needs a larger one, such as {last + 1}"
            )
        self._end_all_of(worker)
        self.former.pop(worker, None)
        self.members[worker] = incarnation

    def leave(self, worker: int) -> None:
        """Remove a worker; its pending push stays."""
        if worker in self.members:
            self._end_all_of(worker)
            self.former[worker] = self.members.pop(worker)

    def _end_all_of(self, worker: int) -> None:
        self.under_way.pop(worker, None)
        if worker in self.waiting:
            del self.waiting[worker]
            if any(push.worker == worker for push in self.pending):
                self.credited[worker] = None

    def ask(self, worker: int) -> bool:
        """Record that a worker requests parameters; False if it is no member, or waits for the commit of its push."""
        if self.members.get(worker, NOT_YET) == NOT_YET or worker in self.waiting:
            return False
        if worker in self.credited:
            del self.credited[worker]
            self.waiting[worker] = None
            return False
        return True

    def num_learners(self) -> int:
        """The number of workers that can have a push in the next commit: the members, and those that left a push."""
        gone = sum(worker not in self.members for worker in self.credited) if self.credited else 0
        return len(self.members) + gone

    def send(self, workers: tuple[int, ...]) -> Send:
        """Send the parameters to the workers."""
        return Send(workers, self.begin_step(workers))

    def begin_step(self, workers: Iterable[int]) -> int:
        """Record that the workers begin a step; return its number."""
        step = self.step
        self.step += 1
        if self.under_way:
            self.under_way.update(dict.fromkeys(workers, step))
        else:
            self.under_way = dict.fromkeys(workers, step)
        return step

    def end_step(self, push: Push) -> bool:
        """Record that a worker's step is done; False if the push is not of its present step."""
        if self.under_way.get(push.worker) != push.step:
            return False
        del self.under_way[push.worker]
        return True

    def end_steps(self, workers: Iterable[int], pushes: Sequence[Push]) -> bool:
        """Record the pushes of several workers; False, and nothing is recorded, if one is of another step."""
        taken = [*map(self.under_way.pop, workers, repeat(None))]
        if taken == [*map(STEP, pushes)]:
            return True
        self.under_way.update((worker, step) for worker, step in zip(workers, taken, strict=True) if step is not None)
        return False

    def carry(self) -> dict[str, Any]:
        """The fields that survive a restart, for JSON; ``take_over`` reads them."""
        return {name: getattr(self, name) for name in self.carried}

    def take_over(self, carried: Mapping[str, Any]) -> None:
        """Set the fields that an earlier state carried."""
        for name in self.carried:
            setattr(self, name, carried[name])

    def as_dict(self) -> dict[str, Any]:
        """The whole state as lists and plain values, for JSON."""
        return {item.name: _plain(getattr(self, item.name)) for item in fields(self)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        """Make a state from the result of ``as_dict``."""
        values = {name: value for name, value in saved.items() if name != "pending"}
        values = {name: dict(value) if isinstance(value, list) else value for name, value in values.items()}
        return cls(**values, pending=[Push(*push) for push in saved["pending"]])


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return [list(item) for item in value.items()]
    return [list(push) for push in value] if isinstance(value, list) else value
