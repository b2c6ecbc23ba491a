"""Injected delays: the seconds by which each step of a real worker is delayed, drawn from a delay.

>>> delays = InjectedDelays("1+exp(0.5) slow(worker=3, factor=5)", parse_unit("40ms"), seed=0, worker=3)
>>> delays.of_step(7) >= 5 * 0.04
True
"""

from __future__ import annotations

import math
import threading

import numpy as np

from paceline.delays.delay import Changed, Delay, Fails, parse_delay
from paceline.errors import UsageError
from paceline.quantities import TIMES, read_quantity
from paceline.seeding import derive_seed

_FRESH = {"bit_generator": "PCG64", "has_uint32": 0, "uinteger": 0}


class InjectedDelays:
    """The injected delays of one worker: times of the delay ``text``, in units of ``unit`` seconds.

    Each is drawn from the seed, the worker, the step and the block alone, so it is the same in every run.
    """

    def __init__(self, text: str, unit: float, *, seed: int, worker: int) -> None:
        self._delay = _without_failures(parse_delay(text))
        self._unit = _check_unit(unit, str(unit))
        self._seed, self._worker = seed, worker
        self._generator = np.random.Generator(np.random.PCG64(0))

    def of_step(self, step: int, block: int = 0) -> float:
        """The seconds by which the step is delayed; of several local steps, by which this block is."""
        place = (step, block) if block else (step,)
        # Setting the state is much faster than a new generator, and the derived seed is already well mixed.
        state = {"state": derive_seed(self._seed, "pause", self._worker, *place), "inc": 1}
        self._generator.bit_generator.state = {**_FRESH, "state": state}
        (time,) = self._delay.sample(self._generator, np.array([self._worker]))
        return min(float(time) * self._unit, threading.TIMEOUT_MAX)  # the longest wait that Python accepts


def parse_unit(text: str) -> float:
    """Read the unit of a delay's times, such as ``40ms``, in seconds."""
    try:
        return _check_unit(read_quantity(text, TIMES), text)
    except UsageError as error:
        raise UsageError(f"cannot read the unit of delays {text!r}: {error}; for example 40ms") from None


def _check_unit(unit: float, text: str) -> float:
    if not 0 < unit < math.inf:
        raise UsageError(f"a unit of time must be above 0 and finite, got {text}")
    return unit


def _without_failures(delay: Delay) -> Delay:
    for change in delay.changes if isinstance(delay, Changed) else ():
        if isinstance(change, Fails):
            raise UsageError(
                f"the delay has {change}, but real workers can only be delayed; "
                "to see one fail, kill its process, as in kill -9 PID"
            )
    return delay
