"""One candidate against what it is to beat: both loaded, measured in turns, their answers compared.

A round measures base, candidate, candidate, base on the same requests, so that a change of the machine's speed meets
both alike, and so that the base against itself shows the noise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..dtypes import DType
from ..preflight import allowed_error, worst_error
from ..providers.base import HostArrays

Settings = dict[str, str]
LEAST_GAIN = 0.02  # what is less is not worth a line in a config
FIRST_ROUNDS = 3
ROUNDS, MOST_ROUNDS = 7, 21  # the latter where the machine is not quiet
QUIET = 0.04
HOPELESS = 1.1  # so much slower after the first rounds, and the rest is not measured
_MAD_TO_SIGMA = 1.4826


class Subject(Protocol):
    """Something under load."""

    def seconds(self, number: int) -> float:
        """Measure slice `number`: seconds a request. The same number means the same requests."""

    def answers(self) -> Sequence[HostArrays]:
        """The answers to a fixed set of requests."""


@dataclass
class Pair:
    """The measurements of a candidate against a base; seconds a request, four a round: base, candidate twice, base.

    `where` says how it was measured: "engine" in this process, "server" by the real server. `refused` is why the
    candidate cannot be used; `error` the largest difference between its answers and the base's.
    """

    axis: str
    base: Settings
    candidate: Settings
    where: str
    rounds: list[list[float]] = field(default_factory=list)
    error: float | None = None
    refused: str = ""

    @property
    def ratios(self) -> list[float]:
        """Candidate by base, in each round."""
        return [(b + c) / (a + d) for a, b, c, d in self.rounds]

    @property
    def ratio(self) -> float:
        """The median of the rounds; below 1 the candidate is faster."""
        return statistics.median(self.ratios) if self.rounds else math.inf

    @property
    def noise(self) -> float:
        """How far the ratio may be off: two standard errors, by the candidate's spread or the base's against itself."""
        if len(self.rounds) < FIRST_ROUNDS:
            return math.inf
        again = [d / a for a, _, _, d in self.rounds]
        sigma = max(_sigma(self.ratios), _sigma(again) / math.sqrt(2))
        return max(LEAST_GAIN, 2 * sigma / math.sqrt(len(self.rounds)))

    @property
    def is_better(self) -> bool:
        """Faster by more than the noise, with the same answers."""
        return not self.refused and self.ratio < 1 - self.noise

    @property
    def base_s(self) -> float:
        """Median seconds a request of the base."""
        return statistics.median(t for a, _, _, d in self.rounds for t in (a, d)) if self.rounds else math.nan

    @property
    def candidate_s(self) -> float:
        """Median seconds a request of the candidate."""
        return statistics.median(t for _, b, c, _ in self.rounds for t in (b, c)) if self.rounds else math.nan

    @property
    def is_done(self) -> bool:
        """Nothing more is to be measured: it is refused, hopeless, decided, or as well known as it will be."""
        count = len(self.rounds)
        if self.refused or count >= MOST_ROUNDS:
            return True
        if count < ROUNDS:
            return count >= FIRST_ROUNDS and self.ratio > HOPELESS + self.noise
        return self.noise <= QUIET or abs(self.ratio - 1) > self.noise


def _sigma(values: Sequence[float]) -> float:
    """A standard deviation that a few wild values do not change."""
    middle = statistics.median(values)
    return _MAD_TO_SIGMA * statistics.median(abs(value - middle) for value in values)


def compare(
    pair: Pair,
    base: Subject,
    candidate: Subject,
    dtypes: Mapping[str, DType],
    rounding: float,
    *,
    at_least: int = 0,
    is_over: Callable[[], bool],
    after_round: Callable[[], None],
) -> None:
    """Compare the answers, then measure rounds until there are enough of them, or the time is over.

    Args:
        rounding: how far two right answers may lie apart beyond the element types' own tolerances.
        at_least: so many rounds are measured even if the time is over.
        after_round: called after each, to keep it.
    """
    if pair.error is None:
        pair.error, pair.refused = difference(base.answers(), candidate.answers(), dtypes, rounding)
        after_round()
    start = len(pair.rounds)
    while not pair.is_done and (len(pair.rounds) - start < at_least or not is_over()):
        number = len(pair.rounds)
        order = (base, candidate, candidate, base)
        pair.rounds.append([subject.seconds(number) for subject in order])
        after_round()


def difference(
    wanted: Sequence[HostArrays], got: Sequence[HostArrays], dtypes: Mapping[str, DType], rounding: float
) -> tuple[float, str]:
    """The largest difference between answers, and a sentence where it is too large."""
    worst = 0.0
    for right, answer in zip(wanted, got, strict=True):
        for name, array in right.items():
            dtype = dtypes[name]
            error = worst_error(answer[name], array, dtype, is_coarse=rounding > 0)
            if error > allowed_error(dtype, rounding):
                return error, f"other answers: output '{name}' differs by {error:.1e}"
            worst = max(worst, error)
    return worst, ""
