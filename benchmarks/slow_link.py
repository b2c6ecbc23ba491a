"""Fewer averages over a slow link: throughput and time to accuracy of policies, against all-reduce.

    python benchmarks/slow_link.py --data DIR [--policies "local-sgd(every=16)"] [--rate 100mbit] [--target 0.93]

Two workers of one thread each, in two network namespaces; the link between them has the rate of a slow network. It
needs root, Linux and iproute2; where that is not possible, the script says so and ends well. `DIR` holds mnist, on
which the 23 MB MLP is trained. All policies begin with the same parameters and get the same batches.

Throughput: the policies take turns in rounds of as many steps as lie between two averages. Time to accuracy: from the
first step to the first evaluation of the averaged parameters that reaches the target; evaluations are not timed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from bucket_sweep import rate

import paceline
from paceline.bench.measuring import Row, be_worker, median_ratio, read_rows, result_file
from paceline.bench.two_hosts import NotPossibleError, run_on, two_hosts
from paceline.policies import Policy, parse_policy
from paceline.problems import Problem, ProblemOptions, load_problem
from paceline.report.table import print_table
from paceline.training.train import evaluate

BASE = "all-reduce"
BATCH = 64  # of each worker
MOST_STEPS = 2000  # of a training that does not reach its target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="where mnist lies")
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--policies", nargs="+", default=["local-sgd(every=16)"], metavar="POLICY")
    parser.add_argument("--rate", type=rate, default="100mbit", help="of the link (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of the throughput")
    parser.add_argument("--target", type=float, default=0.93, help="accuracy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a run of seconds, to see that it works; measures nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--worker", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.model, arguments.rounds, arguments.target = "net1", 1, 0.2
    if arguments.worker is not None:
        be_worker(lambda: measure(arguments), arguments.worker)
        return
    try:
        with two_hosts(arguments.rate) as hosts, result_file() as file:
            code = run_on(hosts, [*sys.argv, "--worker", str(file)])
            if code != 0:
                sys.exit(code)
            rows = read_rows(file)
    except NotPossibleError as error:
        print(json.dumps({"skipped": str(error)}) if arguments.json else f"skipped: {error}")
        return
    if arguments.json:
        print(json.dumps({"rate": arguments.rate, "target": arguments.target, "rows": rows}))
        return
    throughput = {"examples_per_s": ".0f", "throughput_ratio": ".1f"}
    print_table(rows, {"policy": "", **throughput, "steps": "d", "seconds_to_target": ".1f", "speedup": ".1f"})


# A worker's part ----------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace) -> list[Row]:
    problem = load_problem("mnist", ProblemOptions(data=arguments.data, model=arguments.model))
    policies = [parse_policy(text) for text in dict.fromkeys([BASE, *arguments.policies])]
    seconds = round_seconds(problem, policies, arguments)
    reached = [time_to_target(problem, policy, arguments) for policy in policies]
    return [
        {
            "policy": str(policy),
            "examples_per_s": dist.get_world_size() * BATCH / statistics.median(own),
            "throughput_ratio": median_ratio(seconds[0], own),
            "steps": steps,
            "seconds_to_target": to_target,
            "speedup": reached[0][1] / to_target if to_target is not None and reached[0][1] is not None else None,
        }
        for policy, own, (steps, to_target) in zip(policies, seconds, reached, strict=True)
    ]


def round_seconds(problem: Problem, policies: list[Policy], arguments: argparse.Namespace) -> list[list[float]]:
    """The seconds of a step under each policy in each round; the policies take turns."""
    with contextlib.ExitStack() as stack:
        trainings = [Training(problem, policy, arguments.seed, stack) for policy in policies]
        for training in trainings:
            training.steps(training.period)  # buffers are made in the first exchange
        found: list[list[float]] = [[] for _ in trainings]
        for _ in range(arguments.rounds):
            for training, seconds in zip(trainings, found, strict=True):
                seconds.append(training.steps(training.period) / training.period)
    return found


def time_to_target(problem: Problem, policy: Policy, arguments: argparse.Namespace) -> tuple[int, float | None]:
    """Steps and seconds until the averaged parameters reach the target."""
    seconds, steps, every = 0.0, 0, 16
    with contextlib.ExitStack() as stack:
        training = Training(problem, policy, arguments.seed, stack)
        while steps < MOST_STEPS:
            seconds += training.steps(every)
            steps += every
            if training.accuracy() >= arguments.target:
                return steps, seconds
    return steps, None


class Training:
    """A model in training under one policy."""

    def __init__(self, problem: Problem, policy: Policy, seed: int, stack: contextlib.ExitStack) -> None:
        self.period: int = getattr(policy, "every", 1)  # steps between two averages
        torch.manual_seed(seed)
        self._problem, self._model = problem, problem.make_model()
        optimizer = torch.optim.SGD(self._model.parameters(), lr=0.05, momentum=0.9)
        self._session = stack.enter_context(paceline.join(self._model, optimizer, policy=policy, seed=seed))
        self._batches = self._session.batches(problem.train, batch_size=BATCH, epochs=1000)

    def steps(self, count: int) -> float:
        """Make some steps; the seconds that they take."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(count):
            inputs, targets = next(self._batches)
            with self._session.step():
                self._problem.loss(self._model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        return time.perf_counter() - start

    def accuracy(self) -> float:
        """The accuracy of the averaged parameters on the test data."""
        with self._session.averaged():
            return evaluate(self._model, self._problem)[1]


if __name__ == "__main__":
    main()
