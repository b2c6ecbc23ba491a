"""What a worker asks steps for."""

from __future__ import annotations


class Demand(int):
    """Steps on batches that the server hands out, of the epochs below this number; two numbers mean something else."""

    @property
    def own_data(self) -> bool:
        """Whether the steps are without end, and on data of the worker's own."""
        return self < 0

    @property
    def batches(self) -> bool:
        """Whether batches are wanted, and not only the newest parameters."""
        return self > 0


OWN_DATA = Demand(-1)
NEWEST_PARAMETERS = Demand(0)  # and no step
