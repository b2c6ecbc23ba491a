"""What a session costs: deck network 1 on MNIST-shaped data, against the hand-written loop.

    python benchmarks/step_overhead.py [--json]

Two ways, both over the same batches and in one process, their rounds interleaved: `step` feeds ready-made batches
to both loops, so that only `session.step()` differs; `loop` adds the data, a shuffling DataLoader over a
TensorDataset against `session.batches`. The figure is the median over the rounds of the ratio of the two times.
The last row compares two sessions with run directories, of which only the second writes a timeline; neither writes
metrics.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.problems import MODELS

BATCH = 128
STEPS = 100  # of a round: the two loops take turns quickly, since the machine's speed drifts

Loop = Callable[[], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(name, *loops, rounds=arguments.rounds) for name, loops in all_loops().items()]
    if arguments.json:
        print(json.dumps(rows))
        return
    print(f"{'what':28} {'by hand':>12} {'session':>12} {'ratio':>8}")
    for row in rows:
        by_hand, session = row["by_hand_us"], row["session_us"]
        print(f"{row['what']:28} {by_hand:9.1f} us {session:9.1f} us {row['ratio']:8.3f}")


def all_loops() -> dict[str, tuple[Loop, Loop]]:
    dataset = TensorDataset(torch.rand(BATCH * STEPS, 784), torch.randint(0, 10, (BATCH * STEPS,)))
    batches = [dataset[start : start + BATCH] for start in range(0, BATCH * STEPS, BATCH)]
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True)
    return {
        "step, streams left alone": (by_hand(batches), with_session(batches, seed=None)),
        "step, streams seeded": (by_hand(batches), with_session(batches, seed=0)),
        "loop, streams left alone": (by_hand(loader), with_session(dataset, seed=None)),
        "step, timeline or none": (
            with_session(batches, seed=0, timeline=False),
            with_session(batches, seed=0, timeline=True),
        ),
    }


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = MODELS["net1"]((1, 28, 28), 10)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def by_hand(batches: object) -> Loop:
    model, optimizer = parts()

    def loop() -> None:
        for x, y in batches:  # type: ignore[attr-defined]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return loop


def with_session(
    source: list[tuple[Tensor, ...]] | TensorDataset, seed: int | None, *, timeline: bool | None = None
) -> Loop:
    model, optimizer = parts()
    run = None if timeline is None else tempfile.mkdtemp(prefix="step-overhead-")
    session = paceline.join(model, optimizer, seed=seed, run=run, log_every=1_000_000_000)
    if timeline is False:
        session._timeline = None

    def loop() -> None:
        batches = source if isinstance(source, list) else session.batches(source, BATCH)
        for x, y in batches:
            with session.step():
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()  # type: ignore[no-untyped-call]

    return loop


def measure(what: str, hand: Loop, session: Loop, rounds: int) -> dict[str, float | str]:
    hand()
    session()
    times = []
    for number in range(rounds):  # each goes first every other time
        first, second = (hand, session) if number % 2 else (session, hand)
        taken = (seconds(first), seconds(second))
        times.append(taken if number % 2 else taken[::-1])
    return {
        "what": what,
        "by_hand_us": statistics.median(t[0] for t in times) / STEPS * 1e6,
        "session_us": statistics.median(t[1] for t in times) / STEPS * 1e6,
        "ratio": statistics.median(t[1] / t[0] for t in times),
        "rounds": rounds,
    }


def seconds(loop: Loop) -> float:
    start = time.perf_counter()
    loop()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
