"""What every call has: a deadline in seconds, and repeats where they are safe."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass

from client.errors import ClientError, ConnectionLost, InvalidInput, Unreachable, deadline_exceeded

DEFAULT_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Retry:
    """When a failed call is repeated, always within its deadline.

    A call whose connection could not be made was never sent, so it is repeated. A call whose connection broke may have
    run: questions about the server (`is_ready`, `metadata`) are repeated, an inference only when `infer` is True.
    An answer from the server, errors included, and a passed deadline are never repeated.

    Waits grow: `first_wait_s`, twice that, ... up to `longest_wait_s`, each shortened by a random part of up to half.
    """

    attempts: int = 3
    first_wait_s: float = 0.1
    longest_wait_s: float = 2.0
    infer: bool = False

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise InvalidInput(f"Retry.attempts must be 1 or more, got {self.attempts}")
        if not 0 <= self.first_wait_s <= self.longest_wait_s:
            raise InvalidInput(
                f"Retry needs 0 <= first_wait_s <= longest_wait_s, got {self.first_wait_s} and {self.longest_wait_s}"
            )

    def wait_s(self, attempt: int, error: ClientError, is_repeatable: bool, deadline: Deadline) -> float | None:
        """Seconds to wait before the next attempt after attempt number `attempt` (from 1); None: give up."""
        is_safe = isinstance(error, Unreachable) or (isinstance(error, ConnectionLost) and is_repeatable)
        if not is_safe or attempt >= self.attempts:
            return None
        full_s = min(self.first_wait_s * 2.0 ** (attempt - 1), self.longest_wait_s)
        wait_s = full_s * random.uniform(0.5, 1.0)
        return wait_s if wait_s < deadline.left_s() else None


class Deadline:
    """A moment on the monotonic clock. `seconds` may be infinite."""

    def __init__(self, seconds: float, url: str) -> None:
        if not seconds > 0:  # also refuses NaN
            raise InvalidInput(f"deadline_s must be more than 0 seconds (math.inf: none), got {seconds}")
        self.seconds = seconds
        self._url = url
        self._end_s = time.monotonic() + seconds

    def left_s(self) -> float:
        return self._end_s - time.monotonic()

    def remaining_s(self) -> float | None:
        """Seconds left for one attempt, None without a deadline. Raises DeadlineExceeded when there are none."""
        if math.isinf(self.seconds):
            return None
        left_s = self.left_s()
        if left_s <= 0:
            raise deadline_exceeded(self._url, self.seconds)
        return left_s


def server_timeout_us(remaining_s: float | None) -> int | None:
    """Triton's own request timeout, microseconds. Only queues with `allow_timeout_override` look at it."""
    return None if remaining_s is None else max(1, int(remaining_s * 1e6))
