"""What a worker requests steps for."""

from __future__ import annotations


class Demand(int):
    """Steps on batches of the epochs below this number, which the server hands out; or one of the two constants."""

    @property
    def own_data(self) -> bool:
        """Whether the worker uses data of its own, so that its steps do not end."""
        return self < 0

    @property
    def batches(self) -> bool:
        """Whether batches are requested, and not only the newest parameters."""
        return self > 0


OWN_DATA = Demand(-1)
NEWEST_PARAMETERS = Demand(0)  # without a step
