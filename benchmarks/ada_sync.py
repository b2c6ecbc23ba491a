"""How near ada-sync comes to the best fixed k chosen in hindsight: virtual time to every loss, over several seeds.

    python benchmarks/ada_sync.py --data DIR [--seeds 5] [--json]

Real gradients on the virtual clock: mnist, network 2, 8 workers. Losses are on the test data, the mean over the seeds
at each time and its two neighbours; a loss is reached when that is first below it. For every loss that ada-sync
reaches, `ratio` is its time over the least time of k-sync with k = 1, 2, 4 and 8, or over the whole time if none of
these came that far. The worst is the result; the aim is 1.10.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from paceline.problems import ProblemOptions, load_problem
from paceline.report.table import print_table
from paceline.virtual.plan import TrainingPlan
from paceline.virtual.simulate import Scenario
from paceline.virtual.training import simulate_training

FIXED = ("k-sync(k=1)", "k-sync(k=2)", "k-sync(k=4)", "k-sync(k=8)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="where the data sets lie")
    parser.add_argument("--problem", default="mnist")
    parser.add_argument("--model", default="net2")
    parser.add_argument("--policy", default="ada-sync(window=10)")
    parser.add_argument("--delay", default="exp(1)")
    parser.add_argument("--rate", type=float, default=0.3)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--points", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--losses", type=int, default=12, help="losses in the table, evenly in their logarithm")
    parser.add_argument("--quick", action="store_true", help="a run of seconds, to see that it works; measures nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.problem, arguments.model, arguments.rate = "logistic", "net1", 0.1
        arguments.seconds, arguments.points, arguments.seeds = 20.0, 12, 2
    torch.set_num_threads(1)
    curves = {policy: mean_curve(policy, arguments) for policy in (*FIXED, arguments.policy)}
    times = np.linspace(0, arguments.seconds, arguments.points + 1)
    rows = compare(times, curves, arguments.policy, arguments.losses)
    worst = max(float(row["ratio"]) for row in rows)
    if arguments.json:
        print(json.dumps({"policy": arguments.policy, "worst": worst, "rows": rows, "curves": curves}))
    else:
        print_table(rows, {"loss": ".3f", "ada": ".1f", "best": ".1f", "best_k": "", "ratio": ".3f"})
        ends = ", ".join(f"{policy} {curve[-1]:.3f}" for policy, curve in curves.items())
        print(f"worst ratio {worst:.3f}; losses at the end: {ends}")
    sys.exit(0 if worst <= 1.10 or arguments.quick else 1)


def mean_curve(policy: str, arguments: argparse.Namespace) -> list[float]:
    """The test loss at each time, on average over the seeds."""
    options = ProblemOptions(data=arguments.data, model=arguments.model)
    plan = TrainingPlan(
        problem=load_problem(arguments.problem, options),
        optimizer=f"sgd(lr={arguments.rate})",
        batch_size=arguments.batch_size,
        points=arguments.points,
    )
    curves = [
        simulate_training(
            Scenario(policy=policy, workers=8, delay=arguments.delay, seed=seed), plan, seconds=arguments.seconds
        ).curve
        for seed in range(arguments.seeds)
    ]
    mean = np.mean([[point.loss for point in curve] for curve in curves], axis=0)
    return [
        float(mean[max(0, place - 1) : place + 2].mean()) if place else float(mean[0]) for place in range(len(mean))
    ]


def compare(
    times: np.typing.NDArray[np.float64], curves: dict[str, list[float]], policy: str, count: int
) -> list[dict[str, float | str]]:
    """Times to losses from just below the first one to the lowest that the policy reaches."""
    start, end = curves[policy][0], min(curves[policy])
    rows: list[dict[str, float | str]] = []
    for loss in np.geomspace(start, end, count + 1)[1:]:
        reached = {name: time_to(times, curve, loss) for name, curve in curves.items()}
        best_k = min(FIXED, key=lambda name: reached[name])
        own, best = reached[policy], reached[best_k]
        if best == np.inf:  # only the policy itself came that far
            best_k, best = "none", float(times[-1])
        rows.append({"loss": float(loss), "ada": own, "best": best, "best_k": best_k, "ratio": own / best})
    return rows


def time_to(times: np.typing.NDArray[np.float64], curve: Sequence[float], loss: float) -> float:
    """When the curve first comes down to the loss, on a straight line between its points; infinite if never."""
    for place in range(1, len(curve)):
        before, after = curve[place - 1], curve[place]
        if after <= loss:
            share = (before - loss) / (before - after) if before > after else 0.0
            return float(times[place - 1] + max(0.0, share) * (times[place] - times[place - 1]))
    return float("inf")


if __name__ == "__main__":
    main()
