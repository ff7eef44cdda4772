"""When requests of an open loop are due, and waiting for that moment to a fraction of a millisecond."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import gevent

from loadtest.stages import Stage


def due_times(
    plan: Sequence[Stage], *, is_poisson: bool, index: int = 0, count: int = 1, seed: int = 0
) -> Iterator[float]:
    """Seconds from the test's start at which requests are due, ascending, by the stages' rates.

    Args:
        index, count: this is process `index` of `count`. Each gets its share: of a Poisson process a thinner one, of
            constant gaps every `count`-th.
    """
    rng = random.Random(f"{seed}/{index}")
    for stage in plan:
        at_s = stage.start_s
        for number in itertools.count():
            if is_poisson:
                at_s += rng.expovariate(stage.level / count)
            else:  # by multiplication: what is added up drifts
                at_s = stage.start_s + (index + number * count) / stage.level
            if at_s >= stage.end_s:
                break
            yield at_s


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class _Itimerspec(ctypes.Structure):
    _fields_ = [("interval", _Timespec), ("value", _Timespec)]


class Timer:
    """Waits with the kernel's timerfd: gevent's own sleep is up to a millisecond late, which would be measured."""

    _libc = ctypes.CDLL(None, use_errno=True)
    COARSE_S = 0.003  # what is left for it when others, who can be stopped, have slept

    def __init__(self) -> None:
        self._file = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._watcher: Any = gevent.get_hub().loop.io(self._file, 1)

    def wait_until(self, at_s: float) -> None:
        """Let other greenlets run until perf_counter is `at_s`; at once when that is over."""
        left_s = at_s - time.perf_counter()
        if left_s <= 0:
            return
        seconds, rest = divmod(left_s, 1)
        value = _Itimerspec(_Timespec(0, 0), _Timespec(int(seconds), int(rest * 1e9) or 1))
        if self._libc.timerfd_settime(self._file, 0, ctypes.byref(value), None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")
        gevent.get_hub().wait(self._watcher)
        os.read(self._file, 8)

    def close(self) -> None:
        """Give the file back."""
        if self._file >= 0:
            self._watcher.stop()
            self._watcher.close()
            os.close(self._file)
            self._file = -1
