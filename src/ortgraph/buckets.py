"""From the sizes of requests to groups that run together: a total function on sizes, without any I/O.

Words: an *item* is one request, its `Sizes` hold one size for each dimension of the model (`Signature.dims`). A
`Ladder` lists the bucket sizes of a dimension, ascending. A group runs at one `Sizes`: with fixed shapes the bucket's,
else just the largest of its items ("tight"), and the bucket is only the slot's capacity.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .signature import Sizes

Ladder = tuple[int, ...]
Cost = Callable[[Sizes], float]
_MAX_PLANS = 4096


class Item(NamedTuple):
    """One request as grouping sees it: `place` says where in the batch, only items of equal `key` share a group.

    One that cannot join runs exact, just as it is: its axes may not agree on its sizes.
    """

    place: int
    sizes: Sizes
    key: Hashable = ()
    can_join: bool = True


@dataclass(frozen=True)
class Group:
    """Items that run together, in the order of their rows, and the sizes they run at.

    `bucket` is None where no bucket is large enough or a dimension has none: the run is exact.
    """

    items: tuple[Item, ...]
    sizes: Sizes
    bucket: Sizes | None


@dataclass(frozen=True)
class BucketTable:
    """The buckets of a model and how requests are put into them.

    Attributes:
        ladders: for each dimension its bucket sizes, or None where it has none.
        padded: for each dimension whether a smaller size may be padded to a larger one (proven, see preflight.py).
        batch_dim: the dimension along which requests are joined, or None when they are never joined.
        max_rows: the most rows in one group.
        takes_exact: a size that no bucket size of its dimension may hold makes an exact bucket of its own.
        has_fixed_shapes: a run has exactly its bucket's sizes (captured graphs), not the tight ones.
        cost: the estimated time of a run at given sizes, in any unit; decides whether two groups beat one padded one.
    """

    ladders: tuple[Ladder | None, ...]
    padded: tuple[bool, ...]
    batch_dim: int | None
    max_rows: int
    has_fixed_shapes: bool
    cost: Cost
    takes_exact: bool = False
    _plans: dict[tuple[int, Sizes], tuple[float, tuple[int, ...]]] = field(default_factory=dict, repr=False)
    _kinds: dict[Sizes, tuple[bool, Sizes, Sizes]] = field(default_factory=dict, repr=False)

    def fit(self, sizes: Sizes) -> Sizes | None:
        """The smallest bucket that holds these sizes; None when there is none.

        A dimension without a ladder takes its exact size. One that may not be padded must meet a bucket size exactly,
        unless the table takes exact sizes too.
        """
        fitted = []
        for size, ladder, is_padded in zip(sizes, self.ladders, self.padded, strict=True):
            if ladder is None:
                fitted.append(size)
                continue
            place = bisect.bisect_left(ladder, size)
            if place == len(ladder) or size < 0 or (ladder[place] != size and not is_padded):
                if not self.takes_exact or size < 1:
                    return None
                fitted.append(size)
                continue
            fitted.append(ladder[place])
        return tuple(fitted)

    def group(self, items: Sequence[Item]) -> list[Group]:
        """Put every item into exactly one group, with the least estimated run time in total.

        A length of 0 runs exact: padding is proven from 1 on, and the answer for nothing is the model's own.
        """
        groups: list[Group] = []
        joinable: dict[Hashable, list[Item]] = {}
        batch = self.batch_dim
        if batch is not None and len(items) > 1 and self._are_alike(items, batch):
            plan = self._plan(len(items) * items[0].sizes[batch], self._class_of(items[0].sizes, batch))[1]
            return self._fill(items, plan, batch)
        for item in items:
            is_empty, exact_sizes, _ = self._kind(item.sizes)
            if not item.can_join or is_empty:
                groups.append(Group((item,), item.sizes, None))
            elif batch is None or item.sizes[batch] < 1:
                groups.append(self._close([item]))
            else:
                joinable.setdefault((item.key, exact_sizes), []).append(item)
        for members in joinable.values():
            groups += self._partition(members)
        return groups

    @staticmethod
    def _are_alike(items: Sequence[Item], batch: int) -> bool:
        """The common case: every request has the same shapes."""
        first = items[0]
        return 0 not in first.sizes and all(
            item.sizes == first.sizes and item.key == first.key and item.can_join for item in items
        )

    def run_sizes(self, items: Sequence[Item]) -> tuple[Sizes, Sizes | None]:
        """The sizes at which these items would run as one group, and their bucket."""
        tight = items[0].sizes
        if len(items) > 1:
            largest = [max(sizes) for sizes in zip(*(item.sizes for item in items), strict=True)]
            if self.batch_dim is not None:
                largest[self.batch_dim] = sum(item.sizes[self.batch_dim] for item in items)
            tight = tuple(largest)
        bucket = self.fit(tight)
        return (bucket if bucket is not None and self.has_fixed_shapes else tight), bucket

    def _close(self, items: list[Item]) -> Group:
        sizes, bucket = self.run_sizes(items)
        return Group(tuple(items), sizes, bucket)

    def _kind(self, sizes: Sizes) -> tuple[bool, Sizes, Sizes]:
        """Whether a size other than the rows is 0, what must be equal within a group, and the class; computed once."""
        known = self._kinds.get(sizes)
        if known is None:
            is_empty = any(size == 0 for i, size in enumerate(sizes) if i != self.batch_dim)
            own_class = sizes if self.batch_dim is None else self._class_of(sizes, self.batch_dim)
            if len(self._kinds) > _MAX_PLANS:
                self._kinds.clear()
            known = self._kinds[sizes] = is_empty, self._exact_sizes(sizes), own_class
        return known

    def _exact_sizes(self, sizes: Sizes) -> Sizes:
        """The sizes that must be equal within a group: where nothing is padded, and beyond the largest bucket.

        Padding is proven up to that only.
        """
        return tuple(
            -1 if i == self.batch_dim or (is_padded and (ladder is None or size <= ladder[-1])) else size
            for i, (size, is_padded, ladder) in enumerate(zip(sizes, self.padded, self.ladders, strict=True))
        )

    def _partition(self, items: list[Item]) -> list[Group]:
        """Merge neighbours in size where one padded group costs less than two (dynamic programming over the cuts).

        Items of one size (with fixed shapes: of one bucket size) form a class; only whole classes are merged.
        """
        batch = self.batch_dim
        assert batch is not None
        if len(items) == 1:
            return [self._close(items)]
        classes: dict[Sizes, list[Item]] = {}
        for item in items:
            classes.setdefault(self._kind(item.sizes)[2], []).append(item)
        ordered = sorted(classes)
        rows = [sum(item.sizes[batch] for item in classes[sizes]) for sizes in ordered]
        best: list[tuple[float, int]] = [(0.0, 0)]
        for end in range(1, len(ordered) + 1):
            choices = []
            total, largest = 0, ordered[end - 1]
            for start in range(end - 1, -1, -1):
                total += rows[start]
                largest = tuple(map(max, largest, ordered[start]))
                choices.append((best[start][0] + self._plan(total, largest)[0], start))
            best.append(min(choices))
        groups: list[Group] = []
        end = len(ordered)
        while end:
            start = best[end][1]
            merged = [item for sizes in ordered[start:end] for item in classes[sizes]]
            largest = tuple(map(max, *ordered[start:end])) if end - start > 1 else ordered[start]
            total = sum(rows[start:end])
            groups[:0] = self._fill(merged, self._plan(total, largest)[1], batch)
            end = start
        return groups

    def _class_of(self, sizes: Sizes, batch: int) -> Sizes:
        """The sizes without the rows; with fixed shapes those of the bucket, so that there are few classes."""
        if self.has_fixed_shapes:
            fitted = self.fit((*sizes[:batch], 1, *sizes[batch + 1 :]))
            sizes = fitted if fitted is not None else sizes
        return (*sizes[:batch], 0, *sizes[batch + 1 :])

    def _plan(self, rows: int, sizes: Sizes) -> tuple[float, tuple[int, ...]]:
        """Cut this many rows of these sizes into runs of least total time: the cost and the rows of each run."""
        known = self._plans.get((rows, sizes))
        if known is None:
            known = self._best_plan(rows, sizes)
            if len(self._plans) > _MAX_PLANS:
                self._plans.clear()
            self._plans[rows, sizes] = known
        return known

    def _best_plan(self, rows: int, sizes: Sizes) -> tuple[float, tuple[int, ...]]:
        batch = self.batch_dim
        assert batch is not None

        def cost(count: int) -> float:
            return self.cost((*sizes[:batch], count, *sizes[batch + 1 :]))

        ladder = self.ladders[batch]
        if not self.has_fixed_shapes or not ladder:
            full, rest = divmod(rows, self.max_rows)
            counts = [self.max_rows] * full + ([rest] if rest else [])
            return sum(map(cost, counts)), tuple(counts)
        usable = [size for size in ladder if size <= self.max_rows] or [ladder[0]]
        prices = {size: cost(size) for size in usable}
        best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        for count in range(1, rows + 1):
            best.append(
                min(
                    (best[max(count - size, 0)][0] + price, (*best[max(count - size, 0)][1], size))
                    for size, price in prices.items()
                )
            )
        return best[rows][0], tuple(sorted(best[rows][1], reverse=True))

    def _fill(self, items: Sequence[Item], runs: tuple[int, ...], batch: int) -> list[Group]:
        """Deal the items to runs of these many rows, in order; one that does not fit any more opens the next run."""
        groups: list[Group] = []
        capacities = iter(runs)
        current: list[Item] = []
        room = next(capacities)
        for item in items:
            rows = item.sizes[batch]
            if current and rows > room:
                groups.append(self._close(current))
                current, room = [], max(next(capacities, self.max_rows), rows)
            current.append(item)
            room -= rows
        groups.append(self._close(current))
        return groups


def default_batch_ladder(max_batch_size: int, preferred: Sequence[int] = ()) -> Ladder:
    """Batch buckets when none are declared: fine at first, then coarser, with the preferred sizes and the maximum."""
    sizes, size = {1, max_batch_size, *(p for p in preferred if p <= max_batch_size)}, 1
    while size < max_batch_size:
        sizes.add(size)
        size += 1 if size < 4 else 2 if size < 16 else 4 if size < 32 else size // 4
    return tuple(sorted(sizes))
