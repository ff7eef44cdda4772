"""Where more load stops to be worth its latency."""

from __future__ import annotations

from collections.abc import Sequence


def knee(points: Sequence[tuple[float, float, float]]) -> float | None:
    """The load with the most throughput for its P99 (Kleinrock's power): beyond it, latency grows faster.

    Args:
        points: offered load, throughput, P99 in ms.

    Returns:
        None with fewer than three loads, or where latency does not double beyond it: then the knee lies higher.
    """
    measured = sorted(point for point in points if point[2] == point[2])
    if len(measured) < 3:
        return None
    best = max(measured, key=lambda point: point[1] / point[2])
    return best[0] if measured[-1][2] > 2 * best[2] else None
