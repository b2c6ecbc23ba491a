"""Average every gradient over all workers in every step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import UsageError
from paceline.policies.base import PeersPolicy


@dataclass(frozen=True, kw_only=True)
class AllReduce(PeersPolicy):
    """Average gradients over all workers, in buckets and during backward (Li et al., VLDB 2020).

    >>> str(AllReduce(bucket_cap_mb=10, overlap=False))
    'all-reduce(bucket_cap_mb=10.0, overlap=false)'
    """

    name: ClassVar[str] = "all-reduce"

    bucket_cap_mb: float = 25.0  # gradients are reduced in buckets of about this size; 0: one per parameter
    first_bucket_mb: float = 1.0  # the bucket filled first is smaller, so that communication starts early
    overlap: bool = True  # reduce each bucket as soon as backward has filled it, else all after backward

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, size in (
            ("bucket_cap_mb", self.bucket_cap_mb),
            ("first_bucket_mb", self.first_bucket_mb),
        ):
            if not (math.isfinite(size) and size >= 0):
                raise UsageError(f"policy {self.name!r}: {option} must be finite and at least 0, got {size}")
