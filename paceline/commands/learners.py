"""Finds how many learners each worker should have, for ``sma(learners=auto)``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.errors import UsageError
from paceline.launch.environment import PROBE
from paceline.policies import SMA, parse_policy
from paceline.policies.auto_tuner import AutoTuner

_SECONDS = 3.0  # of steps in each probe


def settle_learners(
    policy: str, workers: int, command: Callable[[str], Sequence[str]], environment: Mapping[str, str] | None = None
) -> str:
    """Put a number in the place of ``auto``, found by running ``command(policy)`` with 1, 2, 3, ... learners.

    Each of these probes measures a few seconds of steps.
    """
    parsed = parse_policy(policy)
    if not isinstance(parsed, SMA) or parsed.learners != "auto":
        return policy
    tuner = AutoTuner()
    while not tuner.settled:
        probed = replace(parsed, learners=tuner.learners)
        throughput = _measure(
            command(str(probed)), workers, probed, {**(environment or os.environ), PROBE: str(_SECONDS)}
        )
        print(f"paceline: learners of each worker: {tuner.learners}, examples/s: {throughput:.0f}", file=sys.stderr)
        _, tuner = tuner.measured(throughput)
    return str(replace(parsed, learners=tuner.learners))


def _measure(command: Sequence[str], workers: int, policy: SMA, environment: Mapping[str, str]) -> float:
    """The examples per second of all learners together."""
    from paceline.launch.supervisor import supervise

    found: dict[int, float | None] = {}

    def hear(rank: int, report: dict[str, Any]) -> None:
        if report["event"] == "probed":
            found[rank] = report["throughput"]

    learners = policy.processes_per_worker
    code = supervise(
        command,
        workers=workers * learners,
        policy=str(policy),
        per_device=learners,
        environment=environment,
        on_report=hear,
    )
    if code != 0:
        raise SystemExit(code)
    throughputs = [each for each in found.values() if each is not None]
    if len(throughputs) < workers * learners:
        raise UsageError(
            f"learners=auto cannot be found: in a probe of {_SECONDS:g} s {len(throughputs)} of {workers * learners} "
            f"learners made enough steps; say how many, as in {replace(policy, learners=2)}"
        )
    return sum(throughputs)
