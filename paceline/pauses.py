"""stub"""

from __future__ import annotations
import random


class Pauses:
    def __init__(self, text: str, unit: float, *, seed: int, worker: int) -> None:
        self.unit = unit
        self.seed = seed
        self.worker = worker

    def of_step(self, step: int) -> float:
        return self.unit * (1 + random.Random(self.seed * 1000003 + self.worker * 7919 + step).expovariate(1.0))
