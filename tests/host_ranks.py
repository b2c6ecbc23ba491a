"""Ranks of groups over several hosts as threads of this process; the hosts are names."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from shared_ranks import DEADLINE

from paceline.collectives.two_level import TwoLevelGroup

T = TypeVar("T")


def outcomes_on(hosts: Sequence[str], work: Callable[[Any], T], timeout: float = 60.0) -> list[T | BaseException]:
    """Run ``work(group)`` on one rank per name of a host, and give what each returned or raised."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    results: dict[int, T | BaseException] = {}

    def be(rank: int) -> None:
        group = TwoLevelGroup(store, rank, len(hosts), timedelta(seconds=timeout), "g", hosts)
        try:
            results[rank] = work(group)
        except BaseException as error:
            results[rank] = error
        finally:
            group.shutdown()

    threads = [threading.Thread(target=be, args=(rank,), daemon=True) for rank in range(len(hosts))]
    for thread in threads:
        thread.start()
    end = time.monotonic() + DEADLINE
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    assert len(results) == len(hosts), f"ranks {sorted(set(range(len(hosts))) - set(results))} are still running"
    return [results[rank] for rank in range(len(hosts))]


def on_hosts(hosts: Sequence[str], work: Callable[[Any], T], timeout: float = 60.0) -> list[T]:
    """Run ``work(group)`` on one rank per name of a host; give what they return, or raise what one of them raised."""
    results = []
    for outcome in outcomes_on(hosts, work, timeout):
        if isinstance(outcome, BaseException):
            raise outcome
        results.append(outcome)
    return results
