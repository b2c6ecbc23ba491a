"""The order of each epoch: a shuffle that depends on the seed and the epoch alone."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from paceline.hogwild.arrays import compiled
from paceline.seeding import derive_seed

# Shorter ones take less time than starting a thread for them.
BESIDE_FROM = 100_000


class Orders:
    """Makes the order of the next epoch on a thread beside the present one."""

    def __init__(self, items: int, seed: int) -> None:
        self._items, self._seed = items, seed
        self._made: dict[int, NDArray[np.uint32]] = {}
        self._beside: threading.Thread | None = None

    def take(self, epoch: int) -> NDArray[np.uint32]:
        """The order of this epoch; that of the next is then being made."""
        if self._beside is not None:
            self._beside.join()
            self._beside = None
        if epoch not in self._made:
            self._make(epoch)
        self._made = {made: order for made, order in self._made.items() if made in (epoch, epoch + 1)}
        if self._items >= BESIDE_FROM and epoch + 1 not in self._made:
            self._beside = threading.Thread(target=self._make, args=(epoch + 1,), name="shuffle")
            self._beside.start()
        return self._made[epoch]

    def _make(self, epoch: int) -> None:
        order = np.empty(self._items, np.uint32)
        compiled().shuffle(order.ctypes.data, self._items, derive_seed(self._seed, "order", epoch))
        self._made[epoch] = order
