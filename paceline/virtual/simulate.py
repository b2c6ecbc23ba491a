"""Simulates a policy on virtual workers: times, staleness, waiting, wasted work and bytes."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from paceline.delays.delay import Changed, Delay, Factors, parse_delay
from paceline.errors import UsageError, unknown_name
from paceline.policies import AllReduce, Policy, ServerPolicy, Sync, parse_policy
from paceline.virtual.cluster import Cluster, Workload
from paceline.virtual.links import (
    Link,
    exposed_seconds,
    parse_link,
    ring_bytes,
    ring_seconds,
    tree_seconds,
    two_level_seconds,
)
from paceline.virtual.network import Collective, Instant, Network, ServerLink

Scaling = Literal["weak", "strong"]
Topology = Literal["ring", "tree", "two-level"]
MOST_WORKERS = 1_000_000  # each takes memory
_MOST_BUCKETS = 100_000  # each takes time in every exchange
_LONGEST = 1e9  # seconds; added to a longer time, a step would be lost to float rounding
BACKWARD = 2 / 3  # share of backward in a step: it costs about twice the forward pass


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A policy, its workers, how long they compute and what their messages cost.

    >>> scenario = Scenario(policy="k-sync(k=5)", workers=10, delay="1+exp(0.5)")
    >>> simulate(scenario, commits=1000).waiting < 0.3
    True
    """

    policy: str | Policy
    workers: int
    delay: str | Delay = "1+exp(0.5)"  # compute times of one mini-batch
    link: str | Link = "instant"  # of the server, or of every peer
    nbytes: float = 0.0  # of the parameters, and of a gradient
    examples: int = 1  # in one worker's mini-batch; under strong scaling, in all workers' together
    scaling: Scaling = "weak"  # strong: the workers share one mini-batch, and each computes less
    topology: Topology = "ring"  # of all-reduce
    hosts: int = 1  # of a two-level topology
    inside: str | Link = "instant"  # the link inside a host, of a two-level topology
    notice: float = 10.0  # seconds until a failed worker is noticed
    seed: int = 0

    def __post_init__(self) -> None:
        if self.scaling not in get_args(Scaling):
            raise unknown_name("scaling", self.scaling, get_args(Scaling))
        if self.topology not in get_args(Topology):
            raise unknown_name("topology", self.topology, get_args(Topology))
        if self.workers < 1:
            raise UsageError(f"a cluster has at least 1 worker, got {self.workers}")
        if self.workers > MOST_WORKERS:
            raise UsageError(f"a virtual cluster has at most {MOST_WORKERS:,} workers, got {self.workers:,}")
        if self.hosts < 1 or self.workers % self.hosts:
            raise UsageError(f"{self.workers} workers cannot be spread evenly over {self.hosts} hosts")
        if self.examples < 1:
            raise UsageError(f"a mini-batch has at least 1 example, got {self.examples}")
        if self.scaling == "strong" and self.examples < self.workers:
            raise UsageError(
                f"under strong scaling {self.workers} workers share a mini-batch, and it has {self.examples} examples; "
                f"give it at least as many, as in --examples {32 * self.workers}"
            )
        if not 0 <= self.nbytes < math.inf:
            raise UsageError(f"parameters have 0 or more bytes, got {self.nbytes:g}")
        if not 0 <= self.notice <= _LONGEST:
            raise UsageError(f"the notice of a failure takes from 0 to {_LONGEST:g} seconds, got {self.notice:g}")

    @property
    def compute(self) -> Delay:
        """The compute times of a worker's mini-batch, which is smaller under strong scaling."""
        delay = parse_delay(self.delay)
        if self.scaling == "weak" or self.workers == 1:
            return delay
        share = Factors(values=(1 / self.workers,))
        if isinstance(delay, Changed):
            return dataclasses.replace(delay, changes=(*delay.changes, share))
        return Changed(base=delay, changes=(share,))  # type: ignore[arg-type]  # it is a distribution

    def check(self, *, has_loss: bool) -> ServerPolicy:
        """Raise the errors that ``cluster`` would raise, and return the policy that decides."""
        policy = parse_policy(self.policy)
        if isinstance(policy, AllReduce):
            policy = Sync()  # all workers wait for all; only the network differs
        if not isinstance(policy, ServerPolicy):
            raise UsageError(f"policy {policy} cannot be simulated: only all-reduce and the policies of a server can")
        if policy.needs_loss and not has_loss:
            raise UsageError(
                f"policy {policy} follows the loss, so it needs a problem to train: name one, as in --problem digits"
            )
        policy.begin(self.workers)
        self._pushed_bytes(policy)
        self.compute.check_workers(self.workers)
        self._check_messages()
        return policy

    def _check_messages(self) -> None:
        for link in (self.link, self.inside):
            seconds = parse_link(link).seconds(self.nbytes)
            if seconds > _LONGEST:
                raise UsageError(
                    f"a message of {self.nbytes:g} bytes over a link of {link} takes {seconds:g} s; at most "
                    f"{_LONGEST:g} are possible; choose a faster link, as in --link 1Gbit/s"
                )
        policy = parse_policy(self.policy)
        if isinstance(policy, AllReduce) and _bucket_count(self.nbytes, policy) > _MOST_BUCKETS:
            raise UsageError(
                f"{self.nbytes:g} bytes are {_bucket_count(self.nbytes, policy):,} buckets; at most {_MOST_BUCKETS:,} "
                "are possible; choose larger ones, as in all-reduce(bucket_cap_mb=1000), or a smaller --size"
            )

    def cluster(self, work: Workload | None = None) -> Cluster:
        """Make the virtual cluster; its clock stands at 0."""
        policy = self.check(has_loss=work is not None)
        compute, network = self.compute, self._network()
        examples = self.examples // self.workers if self.scaling == "strong" else self.examples
        return Cluster(
            policy,
            self.workers,
            compute,
            network=network,
            work=work,
            examples=examples,
            notice=self.notice,
            seed=self.seed,
        )

    def _network(self) -> Network:
        policy, link = parse_policy(self.policy), parse_link(self.link)
        if isinstance(policy, AllReduce):
            return Collective(lambda compute: self._exposed(policy, compute), ring_bytes(self.nbytes, self.workers))
        assert isinstance(policy, ServerPolicy)
        pushed = self._pushed_bytes(policy)
        return Instant(self.nbytes, pushed) if link == Link() else ServerLink(link, self.nbytes, pushed)

    def _pushed_bytes(self, policy: ServerPolicy) -> float:
        """The size of a push; raise if the policy's aggregator cannot be."""
        if policy.aggregator == "mean":  # then torch need not be imported
            return self.nbytes
        from paceline.aggregators import Needs, aggregator_of

        return self.nbytes * (2 if aggregator_of(policy, self.workers).needs is Needs.READS else 1)

    def _exposed(self, policy: AllReduce, compute: float) -> float:
        """Seconds of the exchange that the slowest worker's backward pass does not hide."""
        sizes = _buckets(self.nbytes, policy)
        costs = [self._exchange_seconds(size) for size in sizes]
        if not policy.overlap:
            return sum(costs)
        backward = BACKWARD * compute
        filled = np.cumsum(sizes) / max(1.0, self.nbytes)
        return exposed_seconds(backward, (backward * filled).tolist(), costs)

    def _exchange_seconds(self, nbytes: float) -> float:
        link = parse_link(self.link)
        if self.topology == "two-level":
            return two_level_seconds(parse_link(self.inside), link, nbytes, self.hosts, self.workers // self.hosts)
        return (tree_seconds if self.topology == "tree" else ring_seconds)(link, nbytes, self.workers)


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


def simulate(scenario: Scenario, *, commits: int | None = 1000, seconds: float = math.inf) -> Simulated:
    """Run a scenario without gradients for ``commits``, or for ``seconds`` of virtual time."""
    check_length(commits, seconds)
    cluster = scenario.cluster()
    cluster.run(commits=commits, seconds=seconds)
    return summary(scenario, cluster)


def check_length(commits: int | None, seconds: float) -> None:
    """Raise if the length of a run is missing or not positive."""
    if commits is None and seconds == math.inf:
        raise UsageError("a simulation needs an end: a number of commits, or of seconds")
    if commits is not None and commits < 1:
        raise UsageError(f"commits must be at least 1, got {commits}")
    if not seconds > 0:
        raise UsageError(f"seconds must be above 0, got {seconds:g}")


def summary(scenario: Scenario, cluster: Cluster) -> Simulated:
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


def _parallel_efficiency(cluster: Cluster, throughput: float) -> float | None:
    alone = sum(cluster.examples / mean for mean in cluster.mean_times() if mean > 0)
    return throughput / alone if alone and math.isfinite(throughput) else None


def _buckets(nbytes: float, policy: AllReduce) -> list[float]:
    """The sizes of the buckets for this many bytes: the first one, then as many others as needed."""
    count = _bucket_count(nbytes, policy)
    first = policy.first_bucket_mb * 2**20
    if count == 1 or not first:
        return [nbytes / count] * count
    return [first, *[(nbytes - first) / (count - 1)] * (count - 1)]


def _bucket_count(nbytes: float, policy: AllReduce) -> int:
    cap, first = policy.bucket_cap_mb * 2**20, policy.first_bucket_mb * 2**20
    if not cap or nbytes <= first:
        return 1
    return math.ceil((nbytes - first) / cap) + bool(first)
