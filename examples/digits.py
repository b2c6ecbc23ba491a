"""The README's loop, whole: classify the shipped handwritten digits.

python examples/digits.py
"""

from __future__ import annotations

import math

import torch
from torch import nn

import paceline
from paceline.problems import load_problem


def main() -> None:
    torch.manual_seed(0)
    dataset = load_problem("digits").train
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss()

    last_loss = math.nan

    with paceline.join(model, optimizer) as session:
        for x, y in session.batches(dataset, batch_size=64, epochs=10):
            with session.step() as step:
                loss = loss_fn(model(x), y)
                step.record(loss=loss)  # some policies follow it, such as ada-comm
                loss.backward()
            if not step.cancelled:  # as some policies do with late work: then the block may have ended before its loss
                last_loss = loss.item()

        if session.rank == 0:
            print(f"{session.steps} steps, last loss {last_loss:.4f}")


if __name__ == "__main__":
    main()
