"""A scenario: a policy, virtual workers, how long they compute and what their messages cost."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from paceline.delays.delay import Changed, Delay, Factors, Fails, parse_delay
from paceline.errors import UsageError, unknown_name
from paceline.policies import AllReduce, PeersPolicy, Policy, ServerPolicy, Sync, parse_policy
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
MOST_REPLICAS = 256  # workers that train a model of their own; each is a thread
_MOST_BUCKETS = 100_000  # each takes time in every exchange
_LONGEST = 1e9  # seconds; added to a longer time, a step would be lost to float rounding
BACKWARD = 2 / 3  # share of backward in a step: it costs about twice the forward pass


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A policy, its workers, how long they compute and what their messages cost.

    >>> Scenario(policy="k-sync(k=5)", workers=10, delay="1+exp(0.5)").compute.mean(worker=0)
    3.0
    """

    policy: str | Policy
    workers: int
    delay: str | Delay = "1+exp(0.5)"  # compute times of one mini-batch
    link: str | Link = "instant"  # of the server, or of every peer
    nbytes: float = 0.0  # of the parameters, and of a gradient
    examples: int = 1  # in one worker's mini-batch; under strong scaling, in all workers' together
    scaling: Scaling = "weak"  # strong: the workers share one mini-batch, and each computes less
    topology: Topology = "ring"  # of collectives
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

    def check(self, *, has_loss: bool) -> Policy:
        """Raise the errors that a simulation would raise at its start, and return the policy."""
        policy = parse_policy(self.policy)
        _check_messages_only(policy)
        if policy.needs_loss and not has_loss:
            raise UsageError(
                f"policy {policy} follows the loss, so it needs a problem to train: name one, as in --problem digits"
            )
        if isinstance(policy, ServerPolicy):
            policy.begin(self.workers)
            self._pushed_bytes(policy)
        elif not isinstance(policy, AllReduce):
            self._check_never_fails(policy)
        if isinstance(policy, PeersPolicy):
            self._check_learners(policy)
        self.compute.check_workers(self.workers)
        self._check_messages()
        return policy

    def check_training(self) -> Policy:
        """The same for a simulation with real gradients."""
        if self.scaling == "strong":
            raise UsageError("strong scaling is for runs without a problem; with one, choose the workers' batch size")
        policy = self.check(has_loss=True)
        if not isinstance(policy, ServerPolicy):
            self.check_replicas()
        return policy

    def check_replicas(self) -> None:
        """The same for workers that train a model each."""
        policy = parse_policy(self.policy)
        _check_messages_only(policy)
        self._check_never_fails(policy)
        if self.workers > MOST_REPLICAS:
            raise UsageError(
                f"under {policy} each worker has a model of its own; at most {MOST_REPLICAS} are simulated, got "
                f"{self.workers:,}; use fewer workers, or learn the times of local-sgd or all-reduce without a problem"
            )

    def _check_never_fails(self, policy: Policy) -> None:
        delay = self.compute
        failing = [change for change in getattr(delay, "changes", ()) if isinstance(change, Fails)]
        if failing:
            raise UsageError(
                f"under {policy} the workers wait for each other, so {failing[0]} would end the run; failures are "
                "simulated for policies of a server, and for all-reduce without a problem"
            )

    def _check_learners(self, policy: PeersPolicy) -> None:
        learners = policy.processes_per_worker
        if learners > 1:
            raise UsageError(
                f"a virtual worker has one learner, and {policy} wants {learners}; simulate {learners} times as many "
                "workers, with learners=1"
            )
        policy.check_processes(self.workers)

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

    @property
    def worker_examples(self) -> int:
        """Examples in the mini-batch of one worker."""
        return self.examples // self.workers if self.scaling == "strong" else self.examples

    def cluster(self, work: Workload | None = None) -> Cluster:
        """Make the virtual cluster of a policy of a server, or of all-reduce; its clock stands at 0."""
        policy = self.check(has_loss=work is not None)
        if isinstance(policy, AllReduce):
            policy = Sync()  # all workers wait for all; only the network differs
        assert isinstance(policy, ServerPolicy)
        return Cluster(
            policy,
            self.workers,
            self.compute,
            network=self._network(),
            work=work,
            examples=self.worker_examples,
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
        if policy.combined_by == "mean":  # then torch need not be imported
            return self.nbytes
        from paceline.aggregators import Needs, aggregator_of

        return self.nbytes * (2 if aggregator_of(policy, self.workers).needs is Needs.READS else 1)

    def _exposed(self, policy: AllReduce, compute: float) -> float:
        """Seconds of the exchange that the slowest worker's backward pass does not hide."""
        sizes = _buckets(self.nbytes, policy)
        costs = [self.exchange_seconds(size) for size in sizes]
        if not policy.overlap:
            return sum(costs)
        backward = BACKWARD * compute
        filled = np.cumsum(sizes) / max(1.0, self.nbytes)
        return exposed_seconds(backward, (backward * filled).tolist(), costs)

    def exchange_seconds(self, nbytes: float) -> float:
        """The time of an all-reduce of that many bytes."""
        link = parse_link(self.link)
        if self.topology == "two-level":
            return two_level_seconds(parse_link(self.inside), link, nbytes, self.hosts, self.workers // self.hosts)
        return (tree_seconds if self.topology == "tree" else ring_seconds)(link, nbytes, self.workers)


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


def _check_messages_only(policy: Policy) -> None:
    if isinstance(policy, PeersPolicy) and policy.shares_memory:
        raise UsageError(
            f"policy {policy} cannot be simulated: its workers share memory, and virtual ones send messages"
        )
