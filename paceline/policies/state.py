"""What a server policy remembers: who is there, what each is doing, and the pushes not committed yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from paceline.errors import UsageError
from paceline.policies.messages import Push

NOT_YET = -1  # the incarnation of a worker that is expected and has not joined


@dataclass(slots=True)
class Member:
    """One worker as the server knows it."""

    incarnation: int = NOT_YET
    step: int = -1  # the last one begun
    busy: bool = False  # its step is neither pushed nor cancelled
    clock: int = 0  # pushes of it that were taken in


@dataclass
class ServerState:
    """The state of a run under a server policy; ``as_dict`` and ``from_dict`` carry it through JSON."""

    version: int = 0  # commits so far
    members: dict[int, Member] = field(default_factory=dict)
    former: dict[int, int] = field(default_factory=dict)  # last incarnation of those who left
    pending: list[Push] = field(default_factory=list)  # taken in and not committed yet
    waiting: dict[int, None] = field(default_factory=dict)  # members to whom parameters are owed, in order
    credited: dict[int, None] = field(default_factory=dict)  # have a push pending, and have left since, or come back

    def expect(self, workers: int) -> None:
        """Count the workers 0 to ``workers`` - 1 as members before they join: commits wait for them."""
        self.members = {worker: Member() for worker in range(workers)}

    def join(self, worker: int, incarnation: int) -> Member:
        """Let a worker in; whatever an earlier incarnation of it was doing is over."""
        known = self.members.get(worker)
        last = self.former.get(worker, NOT_YET) if known is None else known.incarnation
        if incarnation <= last:
            raise UsageError(
                f"worker {worker} joined as incarnation {incarnation}, but incarnation {last} of it was here already; "
                f"a worker that comes back needs a larger one, such as {last + 1}"
            )
        self._stop_waiting(worker)
        self.former.pop(worker, None)
        member = self.members[worker] = Member(incarnation)
        return member

    def leave(self, worker: int) -> None:
        """Let a worker go; a push of it that is pending stays."""
        member = self.members.pop(worker, None)
        if member is not None:
            self.former[worker] = member.incarnation
            self._stop_waiting(worker)

    def _stop_waiting(self, worker: int) -> None:
        if worker in self.waiting:
            del self.waiting[worker]
            if any(push.worker == worker for push in self.pending):
                self.credited[worker] = None

    def ask(self, worker: int) -> bool:
        """Note that a member wants parameters; False if it is none, or waits for the commit of its push."""
        member = self.members.get(worker)
        if member is None or member.incarnation == NOT_YET or worker in self.waiting:
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

    def begin_steps(self, workers: Iterable[int]) -> None:
        """Note that the workers begin their next steps."""
        members = self.members
        for worker in workers:
            member = members[worker]
            member.step += 1
            member.busy = True

    def end_step(self, push: Push) -> bool:
        """Note that a worker's step is done; False if the push is not of the step that it is on."""
        member = self.members.get(push.worker)
        if member is None or not member.busy or member.step != push.step or member.incarnation != push.incarnation:
            return False
        member.busy = False
        member.clock += 1
        return True

    def as_dict(self) -> dict[str, Any]:
        """Give everything as lists and plain values, fit for JSON."""
        return {item.name: _plain(getattr(self, item.name)) for item in fields(self)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        """Make the state again that ``as_dict`` was taken of."""
        values = {**saved}
        values["members"] = {worker: Member(*member) for worker, member in saved["members"]}
        values["pending"] = [Push(*push) for push in saved["pending"]]
        for name in ("waiting", "credited"):
            values[name] = dict.fromkeys(saved[name])
        values["former"] = dict(saved["former"])
        return cls(**values)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        if all(item is None for item in value.values()):
            return list(value)
        return [[key, _plain(item)] for key, item in value.items()]
    if isinstance(value, Member):
        return [value.incarnation, value.step, value.busy, value.clock]
    if isinstance(value, list):
        return [list(push) for push in value]
    return value
