"""What it costs that a server may be killed: a second copy of everything, at every commit.

    python benchmarks/double_buffer.py [--rounds 15] [--json] [--quick]

For models of several sizes and optimizers: how long an update takes by itself, how much longer until workers are told
(``noting``: what is no tensor is written down, and words are set), and how long the spare takes to be brought up to it
(``copying``: all tensors once), which a server does while its workers compute. One thread; medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from paceline.report.table import print_table
from paceline.store.double_buffer import DoubleBuffer
from paceline.store.gathering import adopt
from paceline.store.layout import ModelLayouts
from paceline.store.memory import HEAD, SharedMemory
from paceline.train_state import TrainState

KB, MB = 1 << 10, 1 << 20
SIZES = (4 * KB, MB, 25 * MB, 100 * MB)
TENSORS = 8
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.1),
    "sgd, momentum": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: Adam(parameters, lr=0.1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="a run of seconds, to see that it works; measures nothing")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes, rounds = (SIZES[:1], 2) if arguments.quick else (SIZES, arguments.rounds)
    rows = [measure(size, name, rounds) for size in sizes for name in OPTIMIZERS]
    if arguments.json:
        print(json.dumps(rows))
        return
    print_table(rows, {"bytes": "d", "optimizer": "", "update_us": ".0f", "noting_us": ".0f", "copying_us": ".0f"})


def measure(size: int, name: str, rounds: int) -> dict[str, Any]:
    file = os.memfd_create("paceline-benchmark")
    model = nn.ParameterList(nn.Parameter(torch.zeros(size // 4 // TENSORS)) for _ in range(TENSORS))
    train_state = TrainState(model=model, optimizers=[OPTIMIZERS[name](model.parameters())])
    layouts = ModelLayouts(model)
    memory = SharedMemory(file, down=layouts.down.nbytes, up=0, slots=0, create=True)
    adopt(layouts, memory.down)
    double_buffer = DoubleBuffer(file, train_state, memory.down, HEAD)
    note = {"queue": {"data": None, "next": 0, "unused": []}, "policy": {"version": 0, "step": 0}, "traced": [0, 0]}
    double_buffer.begin(0, note)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-6)
    times: dict[str, list[float]] = {"update_us": [], "noting_us": [], "copying_us": []}
    for version in range(1, rounds + 3):
        copying = timed(double_buffer.catch_up)
        noting = timed(double_buffer.before_update)
        update = timed(train_state.update)
        noting += timed(lambda version=version: double_buffer.after_update(version, note))  # type: ignore[misc]
        if version > 2:  # the first ones make the optimizer's tensors
            for kind, seconds in zip(times, (update, noting, copying), strict=True):
                times[kind].append(seconds)
    os.close(file)
    return {"bytes": size, "optimizer": name, **{kind: statistics.median(found) * 1e6 for kind, found in times.items()}}


def timed(act: Callable[[], None]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
