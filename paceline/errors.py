"""What can go wrong, as a small tree.

``PacelineError``
  ``UsageError``          the caller asked for something that does not exist or cannot be (also a ``ValueError``)
  ``CheckpointError``     a checkpoint could not be written, or none could be read
  ``RunInUseError``       another live process owns the run directory
  ``NonFiniteLossError``  the loss became NaN or infinite
  ``NonFiniteInputError`` values to encode are NaN or infinite
  ``CommError``           other workers could not be reached, or did not do as this one (also a ``RuntimeError``)
    ``LostContactError``  an exchange with the other workers failed: one of them may have died
    ``OutOfStepError``    the workers do not do the same, so their exchanges do not fit together
  ``WireError``           bytes from another process are not what they should be
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from numbers import Integral


class PacelineError(Exception):
    """Anything Paceline raises on purpose."""


class UsageError(PacelineError, ValueError):
    """The caller's mistake: the message says what was wanted, what was found and what to do."""


class CheckpointError(PacelineError):
    """A checkpoint could not be written, or no usable one could be read."""


class RunInUseError(PacelineError):
    """Another live process owns the run directory."""


class NonFiniteLossError(PacelineError):
    """The loss became NaN or infinite; the parameters were not touched by it."""


class NonFiniteInputError(PacelineError):
    """Values to encode are NaN or infinite, or too large; nothing was sent."""


class CommError(PacelineError, RuntimeError):
    """Other workers could not be reached, or did not do as this one.

    Programs on ``torch.distributed`` expect a ``RuntimeError`` here.
    """


class LostContactError(CommError):
    """An exchange with the other workers failed: one of them may have died."""


class OutOfStepError(CommError):
    """The workers do not do the same, so their exchanges do not fit together."""


class WireError(PacelineError):
    """Bytes from another process are no message, or not one that may come here and now; they were not used."""


def check_whole(name: str, value: object, *, least: int = 1) -> None:
    """Raise unless a value is a whole number of at least so much."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UsageError(f"{name} must be a whole number, got {value!r}")
    if value < least:
        raise UsageError(f"{name} must be at least {least}, got {value}")


def unknown_name(kind: str, name: object, known: Iterable[str]) -> UsageError:
    """Build the error for a name that is in no table, with the nearest one that is."""
    names = sorted(known)
    nearest = difflib.get_close_matches(str(name).lower().replace("_", "-"), names, n=1, cutoff=0.5)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return UsageError(f"no {kind} called {name!r}.{hint} Known: {', '.join(names)}.")
