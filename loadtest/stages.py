"""The shapes of load as stages: so much load from here to there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SHAPES = ("flat", "steps", "spike", "soak")
SOAK_WINDOWS = 10


@dataclass(frozen=True)
class Stage:
    """`level` users (closed loop) or requests a second (open loop), in seconds from the test's start.

    What starts before `measure_s` is warm-up and does not count.
    """

    name: str
    level: float
    start_s: float
    measure_s: float
    end_s: float


def stages(
    shape: str, level: float, *, duration_s: float, warmup_s: float, steps: int = 1, spike: float = 1.0
) -> list[Stage]:
    """The stages of a shape; `duration_s` is what is measured in all of them together.

    - `flat`: `level` all the time.
    - `steps`: so many equal steps up to `level`, each with a warm-up of its own.
    - `spike`: `level`, then `spike` times as much for a fifth of the time, then `level` again. The onset counts.
    - `soak`: `level` all the time, in ten windows, so that a drift shows.
    """
    if shape == "steps":
        parts = [(f"step {i + 1}", level * (i + 1) / steps, duration_s / steps, warmup_s) for i in range(steps)]
    elif shape == "spike":
        parts = [
            ("before", level, 0.4 * duration_s, warmup_s),
            ("spike", level * spike, 0.2 * duration_s, 0.0),
            ("after", level, 0.4 * duration_s, 0.0),
        ]
    elif shape == "soak":
        each_s = duration_s / SOAK_WINDOWS
        parts = [(f"window {i + 1}", level, each_s, 0.0 if i else warmup_s) for i in range(SOAK_WINDOWS)]
    else:
        parts = [("flat", level, duration_s, warmup_s)]
    found, start_s = [], 0.0
    for name, height, measured_s, cold_s in parts:
        end_s = start_s + cold_s + measured_s
        found.append(Stage(name, height, start_s, start_s + cold_s, end_s))
        start_s = end_s
    return found


def endless(level: float, warmup_s: float) -> list[Stage]:
    """One stage that lasts until the test is stopped, as from Locust's web UI."""
    return [Stage("all", level, 0.0, warmup_s, math.inf)]


def stage_at(plan: Sequence[Stage], time_s: float) -> Stage | None:
    """The stage of a moment; None after the last one."""
    return next((stage for stage in plan if time_s < stage.end_s), None)
