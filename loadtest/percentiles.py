"""Percentiles of raw samples: always a value that was measured, never one between two or a bucket's edge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Samples = Sequence[float] | np.ndarray[Any, Any]


def percentile(ordered: Samples, percent: float) -> float:
    """Nearest rank: the smallest sample that at least `percent` of the samples do not exceed.

    `ordered` ascends. NaN when it is empty.
    """
    if not len(ordered):
        return math.nan
    # The tiny amount undoes what binary fractions add: 99.9 % of 1000 is 999, not 999.0000000000001.
    rank = math.ceil(percent * len(ordered) / 100 - 1e-9)
    return float(ordered[min(max(rank, 1), len(ordered)) - 1])


@dataclass(frozen=True)
class Latency:
    """Percentiles in milliseconds and the number of samples behind them; NaN without samples."""

    count: int
    mean_ms: float
    p50_ms: float
    p90_ms: float
    p95_ms: float
    p99_ms: float
    p99_9_ms: float
    max_ms: float

    @classmethod
    def of(cls, samples_ms: Samples) -> Latency:
        """Summarise samples in any order."""
        ordered = np.sort(np.asarray(samples_ms, dtype=np.float64))
        mean_ms = float(ordered.mean()) if len(ordered) else math.nan
        return cls(len(ordered), mean_ms, *(percentile(ordered, percent) for percent in (50, 90, 95, 99, 99.9, 100)))
