"""Closed forms of the expected times and staleness of server policies (Dutta et al., 2018).

>>> from paceline.delays.delay import parse_delay
>>> round(iteration_time("k-sync", parse_delay("1+exp(0.5)"), workers=8, k=4), 3)
2.269
>>> mean_staleness("k-async", workers=8, k=2)
3.0

An iteration is one commit. P is the number of workers, X the time of one mini-batch on one of them, X_{K:P} the K-th
smallest of P of these, H_n the n-th harmonic number. Messages cost no time here. Where no formula is known a
``NoFormulaError`` is raised; the virtual cluster can still measure it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from paceline.delays.delay import Changed, Constant, Delay, Exponential, Pareto, Shifted
from paceline.errors import UsageError, unknown_name


class NoFormulaError(UsageError):
    """No formula is known for this case; it can still be simulated."""


def order_statistic(delay: Delay, k: int, n: int) -> float:
    """E[X_{k:n}], the mean of the k-th smallest of n times; k = n is the slowest.

    Exponential with rate mu: (H_n - H_{n-k})/mu. Pareto with shape s: minimum n!/(n-k)! G(n-k+1-1/s)/G(n+1-1/s), where
    G is the gamma function. A shift adds itself. (David and Nagaraja, Order Statistics, 2003.)
    """
    _check_count("k", k, n)
    if isinstance(delay, Shifted):
        return delay.shift + order_statistic(delay.rest, k, n)
    if isinstance(delay, Constant):
        return delay.mean(0)
    if isinstance(delay, Exponential):
        return math.fsum(1 / i for i in range(n - k + 1, n + 1)) / delay.rate
    if isinstance(delay, Pareto):
        return _pareto_order_statistic(delay, k, n)
    if n == 1 and not isinstance(delay, Changed):
        return delay.mean(0)
    raise _no_formula(f"the {k}th of {n} times", delay)


def _pareto_order_statistic(delay: Pareto, k: int, n: int) -> float:
    left = n - k + 1 - 1 / delay.shape
    if left <= 0:
        return math.inf
    logarithm = math.lgamma(n + 1) - math.lgamma(n - k + 1) + math.lgamma(left) - math.lgamma(left + k)
    return delay.minimum * math.exp(logarithm)


def k_sync_time(delay: Delay, workers: int, k: int) -> float:
    """E[X_{K:P}]: the round ends with the K-th worker. K = P is sync, K = P - b has b backup workers."""
    return order_statistic(delay, k, workers)


def k_batch_sync_time(delay: Delay, workers: int, k: int) -> float:
    """K/(P mu) for Exp(mu), ceil(K/P) c for a constant c, E[X_{1:P}] for K = 1; unknown otherwise.

    All P workers start anew after a commit; their K-th mini-batch makes the next one. ``time_bounds`` bounds the rest.
    """
    _check_count("k", k)
    if isinstance(delay, Exponential):
        return k / (workers * delay.rate)
    if isinstance(delay, Constant):
        return math.ceil(k / workers) * delay.mean(0)
    if k == 1:
        return order_statistic(delay, 1, workers)
    raise _no_formula("k-batch-sync with k > 1", delay)


def k_async_time(delay: Delay, workers: int, k: int) -> float:
    """(H_P - H_{P-K})/mu for Exp(mu), c/floor(P/K) for a constant c; else known for K = 1 and for K = P.

    K = 1 is async. With K = P all workers wait for all, as in sync. Any shift makes 1 < K < P faster than K-sync.
    """
    _check_count("k", k, workers)
    if k == 1:
        return k_batch_async_time(delay, workers, 1)
    if isinstance(delay, Exponential) or k == workers:
        return order_statistic(delay, k, workers)
    if isinstance(delay, Constant):
        return delay.mean(0) / (workers // k)
    raise _no_formula("k-async with 1 < k < workers", delay)


def k_batch_async_time(delay: Delay, workers: int, k: int) -> float:
    """K E[X]/P for every distribution, by renewal; K over the sum of 1/E[X_i] where workers differ.

    No worker ever waits, so worker i pushes once in E[X_i] on average.
    """
    _check_count("k", k)
    if not isinstance(delay, Changed):
        return k * delay.mean(0) / workers
    means = [delay.mean(worker) for worker in range(workers)]
    if min(means) == 0:
        return 0.0
    rate = math.fsum(1 / mean for mean in means)
    return k / rate if rate > 0 else math.inf


TIMES: dict[str, Callable[[Delay, int, int], float]] = {
    "sync": lambda delay, workers, _: k_sync_time(delay, workers, workers),
    "k-sync": k_sync_time,
    "k-batch-sync": k_batch_sync_time,
    "async": lambda delay, workers, _: k_batch_async_time(delay, workers, 1),
    "k-async": k_async_time,
    "k-batch-async": k_batch_async_time,
}
STALENESS: dict[str, Callable[[int, int], float]] = {
    "sync": lambda workers, k: 0.0,
    "k-sync": lambda workers, k: 0.0,
    "k-batch-sync": lambda workers, k: 0.0,
    "async": lambda workers, k: workers - 1.0,
    "k-async": lambda workers, k: workers / k - 1,
    "k-batch-async": lambda workers, k: (workers - 1) / k,
}


def iteration_time(policy: str, delay: Delay, workers: int, k: int = 1) -> float:
    """Expected time between two commits of the policy of that name; sync and async do not look at ``k``."""
    _check_policy(policy, TIMES)
    _check_count("workers", workers)
    delay.check_workers(workers)
    return TIMES[policy](delay, workers, k)


def mean_staleness(policy: str, workers: int, k: int = 1) -> float:
    """Mean number of commits between the read of a gradient's parameters and the commit that uses it.

    P/K - 1 for K-async: each commit has K of P workers, so a worker is in every (P/K)-th on average. (P-1)/K for
    K-batch-async, if the worker whose push completes a commit pulls after it: between two pushes of one worker lie
    P-1 of others on average. Both hold for all compute times, also if some workers are slower, but not after failures.
    """
    _check_policy(policy, STALENESS)
    _check_count("workers", workers)
    _check_count("k", k, workers if policy == "k-async" else None)
    return STALENESS[policy](workers, k)


def k_async_staleness_share(delay: Delay, workers: int, k: int, staleness: int) -> float:
    """The share of gradients that are d commits stale under K-async with Exp times: (K/P) (1 - K/P)^d.

    Exponential times have no memory, so after each commit the next K workers are any K of the P.
    """
    _check_count("k", k, workers)
    if not isinstance(delay, Exponential):
        raise _no_formula("the spread of staleness", delay)
    return k / workers * (1 - k / workers) ** staleness


def time_bounds(delay: Delay, workers: int, k: int) -> tuple[float, float]:
    """The lower bound K E[X]/P and the upper bound E[X_{K:P}] of K-batch-sync and K-async.

    They hold for times that are "new better than used in expectation": a mini-batch under way is not expected to take
    longer than a new one. Constants and exponentials, also shifted, are such; Pareto is not.
    """
    rest = delay.rest if isinstance(delay, Shifted) else delay
    if not isinstance(rest, Constant | Exponential):
        raise _no_formula("bounds", delay)
    return k_batch_async_time(delay, workers, k), order_statistic(delay, k, workers)


def sync_over_async(delay: Delay, workers: int) -> float:
    """The time of a sync commit over that of an async one: P E[X_{P:P}]/E[X].

    Per mini-batch it is only E[X_{P:P}]/E[X], since a sync commit uses P of them.
    """
    return iteration_time("sync", delay, workers) / iteration_time("async", delay, workers)


def _check_policy(policy: str, table: dict[str, Callable[..., float]]) -> None:
    if policy not in table:
        raise unknown_name("policy with a formula", policy, table)


def _check_count(name: str, count: int, most: int | None = None) -> None:
    if count < 1 or (most is not None and count > most):
        wanted = "at least 1" if most is None else f"from 1 to {most}"
        raise UsageError(f"{name} must be {wanted}, got {count}")


def _no_formula(what: str, delay: Delay) -> NoFormulaError:
    why = "workers differ" if isinstance(delay, Changed) else "only special cases have one"
    return NoFormulaError(f"no formula is known for {what} under {delay} ({why}); simulate it instead")
