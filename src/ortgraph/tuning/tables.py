"""Bucket tables for a load: the fewest sizes that waste next to no device time, by measured times.

A length that is no bucket size is padded to the next one, which costs the time of the larger run. For each number of
sizes the best ones are found exactly (dynamic programming over the candidate sizes); how good a whole table is shows
the serving package's own grouping, on batches drawn from the load, priced at the measured times.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..buckets import BucketTable, Item, Ladder
from ..signature import Sizes
from .load import Load, spread

ALLOWED_WASTE = 0.01
MAX_LENGTHS = 24
_TRIALS = 48


@dataclass(frozen=True)
class Plan:
    """A table: its ladders, and the mean seconds of a batch, beside those of all candidate sizes together."""

    ladders: tuple[Ladder | None, ...]
    seconds: float
    least_s: float

    @property
    def waste(self) -> float:
        """The share of device time beyond the least possible with the candidate sizes."""
        return self.seconds / self.least_s - 1


def best_ladders(weights: Mapping[int, float], cost: Mapping[int, float]) -> list[Ladder]:
    """For 1, 2, 3 ... sizes out of those in `cost` the ones of least cost in total.

    Args:
        weights: how often each size comes; the largest candidate holds them all.
        cost: of a run at each candidate size.
    """
    sizes = sorted(cost)
    held = [0.0] * len(sizes)  # the weight that falls to each candidate if all of them are chosen
    for size, weight in weights.items():
        held[bisect.bisect_left(sizes, size)] += weight
    sums = [0.0, *itertools.accumulate(held)]
    # best[j]: least cost of all sizes up to candidate j, which is chosen, with so many chosen; and which.
    best: list[tuple[float, Ladder]] = [(sums[j + 1] * cost[size], (size,)) for j, size in enumerate(sizes)]
    found = [best[-1][1]]
    for _ in range(1, len(sizes)):
        longer: list[tuple[float, Ladder]] = [(math.inf, ())] * len(sizes)
        for j, size in enumerate(sizes):
            for i in range(j):
                price = best[i][0] + (sums[j + 1] - sums[i + 1]) * cost[size]
                if price < longer[j][0]:
                    longer[j] = (price, (*best[i][1], size))
        best = longer
        found.append(best[-1][1])
    return found


def candidate_lengths(load: Load, limit: int) -> list[int]:
    """At most so many sizes worth a bucket: multiples of 8 (any below 64) that hold the load's lengths."""
    step = 8 if max(load.lengths) > 64 else 1
    return list(spread({-(-length // step) * step for length in load.lengths}, min(limit, MAX_LENGTHS)))


def plan(
    table: BucketTable, draw: Callable[[random.Random], list[Sizes]], lengths: Sequence[int], places: Sequence[int]
) -> Plan:
    """The fewest sizes whose batches take at most `ALLOWED_WASTE` more than those of all candidates.

    Args:
        table: with all candidate sizes, and the measured times as its cost.
        draw: the sizes of a batch's requests.
        lengths: the candidate sizes of the dimensions at `places`, which have them in common.
    """
    rng = random.Random(1)
    trials = [draw(rng) for _ in range(_TRIALS)]
    batch = table.batch_dim

    def with_ladder(now: BucketTable, at: Sequence[int], ladder: Ladder) -> BucketTable:
        ladders = tuple(ladder if i in at else old for i, old in enumerate(now.ladders))
        return replace(now, ladders=ladders, _plans={})

    least_s = _price(table, trials)
    seen = Counter(max(sizes[place] for place in places) for trial in trials for sizes in trial)
    rows = batch is not None and table.ladders[batch]
    full = max((len(trial) for trial in trials), default=1)

    def at(length: int, count: int) -> Sizes:
        return tuple(length if i in places else count if i == batch else 1 for i in range(len(table.ladders)))

    chosen = table
    usual = next((size for size in rows or () if size >= full), (rows or (1,))[-1])
    for ladder in best_ladders(seen, {length: table.cost(at(length, usual)) for length in lengths}):
        chosen = with_ladder(table, places, ladder)
        if _price(chosen, trials) <= least_s * (1 + ALLOWED_WASTE):
            break
    if batch is not None and rows:
        counts = Counter(
            sum(item.sizes[batch] for item in group.items) for trial in trials for group in chosen.group(_items(trial))
        )
        middle = sorted(seen.elements())[sum(seen.values()) // 2]
        length = next(size for size in (chosen.ladders[places[0]] or (middle,)) if size >= middle)
        fine = chosen
        for ladder in best_ladders(counts, {size: table.cost(at(length, size)) for size in rows}):
            chosen = with_ladder(fine, [batch], tuple(sorted({1, *ladder})))
            if _price(chosen, trials) <= least_s * (1 + ALLOWED_WASTE):
                break
    return Plan(chosen.ladders, _price(chosen, trials), least_s)


def _items(trial: Sequence[Sizes]) -> list[Item]:
    return [Item(place, sizes) for place, sizes in enumerate(trial)]


def _price(table: BucketTable, trials: Sequence[Sequence[Sizes]]) -> float:
    """Mean seconds of a batch."""
    total = sum(table.cost(group.sizes) for trial in trials for group in table.group(_items(trial)))
    return total / len(trials)
