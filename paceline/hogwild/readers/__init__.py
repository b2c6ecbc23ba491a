"""Readers of sparse problems: libsvm rows, ratings, and flow networks of DIMACS."""

from __future__ import annotations

from paceline.hogwild.readers.dimacs import FlowNetwork, read_dimacs
from paceline.hogwild.readers.libsvm import LibsvmRows, read_libsvm
from paceline.hogwild.readers.ratings import RatingEntries, read_ratings

__all__ = ["FlowNetwork", "LibsvmRows", "RatingEntries", "read_dimacs", "read_libsvm", "read_ratings"]
