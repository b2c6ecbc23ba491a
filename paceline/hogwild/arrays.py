"""Arrays that the compiled engine reads where they lie: their types and memory are checked, nothing is copied."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UsageError

REALS = (np.float32, np.float64)
INDICES = (np.int32, np.int64)


def compiled() -> ModuleType:
    """The compiled engine, or an error that says why there is none."""
    try:
        from paceline.native import _sparse
    except ImportError as error:
        raise UsageError(
            f"the compiled engine of sparse problems is missing ({error}); install Paceline with a C++20 compiler at "
            "hand, on Linux"
        ) from None
    return _sparse


def check_array(name: str, array: Any, types: tuple[type[np.generic], ...], length: int | None = None) -> None:
    """Raise unless it is a vector of one of these types that C code can read."""
    wanted = " or ".join(kind.__name__ for kind in types)
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype not in types:
        found = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise UsageError(f"{name}: wanted a numpy vector of {wanted}, got {found}")
    if length is not None and len(array) != length:
        raise UsageError(f"{name}: wanted {length} numbers, got {len(array)}")
    if not (array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative):
        raise UsageError(f"{name}: wanted contiguous memory; pass numpy.ascontiguousarray({name})")


def check_size(name: str, value: object, least: int) -> None:
    """Raise unless a size is a whole number of at least so much."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UsageError(f"{name}: wanted a whole number, got {value!r}")
    if value < least:
        raise UsageError(f"{name}: wanted at least {least}, got {value}")


def check_alike(one_name: str, one: NDArray[Any], name: str, array: NDArray[Any]) -> None:
    """Raise unless two arrays have the same type."""
    if one.dtype != array.dtype:
        raise UsageError(f"{name}: wanted {one.dtype} as {one_name} has, got {array.dtype}; use astype")


@dataclass(frozen=True, eq=False)
class CSR:
    """Sparse rows: row i has ``values[indptr[i]:indptr[i + 1]]`` in the columns ``indices[...]``, as scipy's.

    Entries of a row may come in any order. Several in one column add up.
    """

    indptr: NDArray[Any]
    indices: NDArray[Any]
    values: NDArray[Any]
    columns: int

    def __post_init__(self) -> None:
        check_array("values", self.values, REALS)
        check_array("indices", self.indices, INDICES, len(self.values))
        check_array("indptr", self.indptr, INDICES)
        if len(self.indptr) < 1:
            raise UsageError("indptr: wanted one number more than there are rows, got none")
        check_size("columns", self.columns, 0)

    @classmethod
    def from_scipy(cls, matrix: Any) -> CSR:
        """The rows of a ``scipy.sparse`` CSR matrix or array, in its memory."""
        if getattr(matrix, "format", None) != "csr":
            raise UsageError(f"wanted a CSR matrix of scipy, got {type(matrix).__name__}; pass matrix.tocsr()")
        return cls(matrix.indptr, matrix.indices, matrix.data, matrix.shape[1])

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.indptr) - 1
