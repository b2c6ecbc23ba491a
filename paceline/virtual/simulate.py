"""Simulates a policy on virtual workers: times, staleness, waiting, wasted work and bytes."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.delays.delay import parse_delay
from paceline.errors import UsageError
from paceline.policies import AllReduce, ServerPolicy, parse_policy
from paceline.virtual.cluster import Cluster
from paceline.virtual.peers_clock import PeersClock
from paceline.virtual.rounds import Rounds
from paceline.virtual.scenario import Scenario

if TYPE_CHECKING:
    from paceline.virtual.peers import ExchangeTimes

__all__ = ["Scenario", "Simulated", "as_record", "begin", "check_length", "simulate", "summary"]


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """The results of a simulation; shares are of all workers' time, without failed workers."""

    policy: str
    workers: int
    delay: str
    commits: int
    seconds: float  # on the virtual clock
    iteration: float  # seconds per commit
    iteration_error: float | None  # its standard error, as if commits were independent
    pushes: int  # committed
    throughput: float  # examples committed per second
    staleness: float  # commits between read and use, mean over the committed pushes
    staleness_histogram: dict[int, int]
    waiting: float  # share of time in which workers did not compute
    thrown_away: float  # share of time computing steps that were cancelled or dropped
    cancelled: int  # steps
    dropped: int  # pushes that came too late
    bytes_in: float  # to the server, in all
    bytes_out: float  # from the server, or between peers
    scaling_efficiency: float | None  # time of an iteration on worker 0 alone over the time per commit
    parallel_efficiency: float | None  # throughput over that of as many workers that never wait


def begin(scenario: Scenario) -> Cluster | Rounds | ExchangeTimes:
    """Make what runs a scenario without gradients; its clock stands at 0."""
    policy = scenario.check(has_loss=False)
    if isinstance(policy, ServerPolicy | AllReduce):
        return scenario.cluster()
    if Rounds.fit(policy):
        return Rounds(scenario)
    from paceline.virtual.peers import ExchangeTimes  # takes torch's seconds

    return ExchangeTimes(scenario)


def simulate(scenario: Scenario, *, commits: int | None = 1000, seconds: float = math.inf) -> Simulated:
    """Run a scenario without gradients for ``commits``, or for ``seconds`` of virtual time.

    >>> simulate(Scenario(policy="k-sync(k=5)", workers=10, delay="1+exp(0.5)")).waiting < 0.3
    True
    """
    check_length(commits, seconds)
    run = begin(scenario)
    run.run(commits=commits, seconds=seconds)
    return summary(scenario, run)


def check_length(commits: int | None, seconds: float) -> None:
    """Raise if the length of a run is missing or not positive."""
    if commits is None and seconds == math.inf:
        raise UsageError("a simulation needs an end: a number of commits, or of seconds")
    if commits is not None and commits < 1:
        raise UsageError(f"commits must be at least 1, got {commits}")
    if not seconds > 0:
        raise UsageError(f"seconds must be above 0, got {seconds:g}")


def summary(scenario: Scenario, cluster: Cluster | PeersClock) -> Simulated:
    """The results of a cluster up to its present time."""
    tally, now = cluster.tally, cluster.now
    if not tally.commit_times:
        raise UsageError(
            f"policy {scenario.policy} on {scenario.workers} workers made no commit within {now:g} s; let it run longer"
        )
    gaps = np.diff([0.0, *tally.commit_times])
    total = scenario.workers * now - cluster.failed
    end = tally.commit_times[-1]
    stale = sum(staleness * count for staleness, count in tally.staleness.items())
    throughput = tally.examples / end if end else math.inf
    iteration = float(gaps.mean())
    return Simulated(
        policy=str(scenario.policy),
        workers=scenario.workers,
        delay=str(scenario.delay),
        commits=len(gaps),
        seconds=now,
        iteration=iteration,
        iteration_error=float(gaps.std(ddof=1) / math.sqrt(len(gaps))) if len(gaps) > 1 else None,
        pushes=tally.pushes,
        throughput=throughput,
        staleness=stale / tally.pushes,
        staleness_histogram=dict(sorted(tally.staleness.items())),
        waiting=max(0.0, 1 - cluster.computed / total) if total else 0.0,
        thrown_away=tally.thrown_away / total if total else 0.0,
        cancelled=tally.cancelled,
        dropped=tally.dropped,
        bytes_in=cluster.network.bytes_in,
        bytes_out=cluster.network.bytes_out,
        scaling_efficiency=_scaling_efficiency(scenario, iteration),
        parallel_efficiency=_parallel_efficiency(cluster, throughput),
    )


def as_record(result: Simulated) -> dict[str, Any]:
    """All results as a dict that fits JSON."""
    values = dataclasses.asdict(result)
    return {name: None if value in (math.inf, -math.inf) else value for name, value in values.items()}


def _scaling_efficiency(scenario: Scenario, iteration: float) -> float | None:
    """Compare with one worker, which computes a mini-batch (of all workers, under strong scaling) without messages."""
    policy = parse_policy(scenario.policy)
    batches = policy.local_steps if isinstance(policy, ServerPolicy) else 1
    alone = parse_delay(scenario.delay).mean(0) * batches
    return alone / iteration if iteration > 0 and math.isfinite(alone) else None


def _parallel_efficiency(cluster: Cluster | PeersClock, throughput: float) -> float | None:
    alone = sum(cluster.examples / mean for mean in cluster.mean_times() if mean > 0)
    return throughput / alone if alone and math.isfinite(throughput) else None
