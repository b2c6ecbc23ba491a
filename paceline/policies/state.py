"""What a server policy remembers: who is there, what each is doing, and the pushes not committed yet."""

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

    Steps have numbers of their own, given out with the parameters: the push of a step that was cancelled, or of an
    earlier incarnation, is known by its number.
    """

    carried: ClassVar[tuple[str, ...]] = ("version", "step")  # what stays when all workers are gone and come anew

    version: int = 0  # commits so far
    step: int = 0  # the number of the next step to begin
    members: dict[int, int] = field(default_factory=dict)  # worker -> incarnation
    former: dict[int, int] = field(default_factory=dict)  # the same of those who left
    under_way: dict[int, int] = field(default_factory=dict)  # worker -> the step that it is on
    pending: list[Push] = field(default_factory=list)  # taken in and not committed yet
    waiting: dict[int, None] = field(default_factory=dict)  # members to whom parameters are owed, in order
    credited: dict[int, None] = field(default_factory=dict)  # have a push pending, and have left since, or come back

    def join(self, worker: int, incarnation: int) -> None:
        """Let a worker in; whatever an earlier incarnation of it was doing is over."""
        last = self.members.get(worker, self.former.get(worker, NOT_YET))
        if incarnation <= last:
            raise UsageError(
                f"worker {worker} joined as incarnation {incarnation}, but incarnation {last} of it was here already; "
                f"a worker that comes back needs a larger one, such as {last + 1}"
            )
        self._end_all_of(worker)
        self.former.pop(worker, None)
        self.members[worker] = incarnation

    def leave(self, worker: int) -> None:
        """Let a worker go; a push of it that is pending stays."""
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
        """Note that a member wants parameters; False if it is none, or waits for the commit of its push."""
        if self.members.get(worker, NOT_YET) == NOT_YET or worker in self.waiting:
            return False
        if worker in self.credited:
            del self.credited[worker]
            self.waiting[worker] = None
            return False
        return True

    def num_learners(self) -> int:
        """How many workers can have a push in the next commit: the members, and those who left one behind."""
        gone = sum(worker not in self.members for worker in self.credited) if self.credited else 0
        return len(self.members) + gone

    def send(self, workers: tuple[int, ...]) -> Send:
        """Send the parameters to the workers."""
        return Send(workers, self.begin_step(workers))

    def begin_step(self, workers: Iterable[int]) -> int:
        """Note that the workers begin a step, and give its number."""
        step = self.step
        self.step += 1
        if self.under_way:
            self.under_way.update(dict.fromkeys(workers, step))
        else:
            self.under_way = dict.fromkeys(workers, step)
        return step

    def end_step(self, push: Push) -> bool:
        """Note that a worker's step is done; False if the push is not of the step that it is on."""
        if self.under_way.get(push.worker) != push.step:
            return False
        del self.under_way[push.worker]
        return True

    def end_steps(self, workers: Iterable[int], pushes: Sequence[Push]) -> bool:
        """The same for the pushes of different workers; False, and nothing is noted, if one is of another step."""
        taken = [*map(self.under_way.pop, workers, repeat(None))]
        if taken == [*map(STEP, pushes)]:
            return True
        self.under_way.update((worker, step) for worker, step in zip(workers, taken, strict=True) if step is not None)
        return False

    def carry(self) -> dict[str, Any]:
        """Give what a state that begins anew takes over by ``take_over``, fit for JSON."""
        return {name: getattr(self, name) for name in self.carried}

    def take_over(self, carried: Mapping[str, Any]) -> None:
        """Go on from what an earlier state carries."""
        for name in self.carried:
            setattr(self, name, carried[name])

    def as_dict(self) -> dict[str, Any]:
        """Give everything as lists and plain values, fit for JSON."""
        return {item.name: _plain(getattr(self, item.name)) for item in fields(self)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        """Make the state again that ``as_dict`` was taken of."""
        values = {name: value for name, value in saved.items() if name != "pending"}
        values = {name: dict(value) if isinstance(value, list) else value for name, value in values.items()}
        return cls(**values, pending=[Push(*push) for push in saved["pending"]])


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return [list(item) for item in value.items()]
    return [list(push) for push in value] if isinstance(value, list) else value
