"""The base of every policy: a frozen value with a name and a text form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.spec import check_types, to_spec


@dataclass(frozen=True, kw_only=True)
class Policy:
    """When and how workers synchronise; a subclass is a frozen dataclass and one line in ``POLICIES``."""

    name: ClassVar[str]  # as users type it, with hyphens
    needs_loss: ClassVar[bool] = False  # whether decisions depend on the workers' losses

    def __post_init__(self) -> None:
        check_types("policy", self.name, self)

    def __str__(self) -> str:
        """The text form, which ``parse_policy`` reads back to an equal policy."""
        return to_spec(self.name, self)


@dataclass(frozen=True, kw_only=True)
class PeersPolicy(Policy):
    """A policy of collective operations over a process group, without a server."""

    shares_memory: ClassVar[bool] = False  # whether workers write to memory that all of them read

    @property
    def processes_per_worker(self) -> int:
        """How many processes share a worker's device; each is a rank of its own."""
        return 1

    def check_processes(self, processes: int) -> None:
        """Raise if the policy cannot run on this many processes."""
