"""Device buffers that retired buckets gave back, for the next bucket.

What is given back together is a generation. Reuse takes the newest buffer first (it is the warmest, and what a set of
buckets gave back, the same set finds again); when there are more generations than wanted, the oldest one is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

from .metrics import Metrics

Buffer = TypeVar("Buffer")


class BufferPool(Generic[Buffer]):
    """Buffers of one session, by what makes two of them interchangeable (the key). One thread, or under its lock."""

    def __init__(self, generations: int, metrics: Metrics, release: Callable[[Buffer], None] = lambda buffer: None):
        """Keep at most this many generations, 0 keeps nothing; `release` frees a buffer that is dropped."""
        self._limit = generations
        self._metrics = metrics
        self._release = release
        self._generations: list[list[tuple[Hashable, Buffer]]] = []

    def __len__(self) -> int:
        """How many buffers wait for reuse."""
        return sum(map(len, self._generations))

    def take(self, key: Hashable, allocate: Callable[[], Buffer]) -> Buffer:
        """The buffer of this key that was given back last, else a new one. Its contents are undefined."""
        for generation in reversed(self._generations):
            for place in range(len(generation) - 1, -1, -1):
                if generation[place][0] == key:
                    self._metrics.add("ortgraph_pool_hits_total")
                    buffer = generation.pop(place)[1]
                    self._generations = [kept for kept in self._generations if kept]
                    return buffer
        buffer = allocate()
        self._metrics.add("ortgraph_pool_misses_total")
        return buffer

    def give_back(self, buffers: Iterable[tuple[Hashable, Buffer]]) -> None:
        """One generation; no run may still read or write these buffers."""
        generation = list(buffers)
        if generation:
            self._generations.append(generation)
        while len(self._generations) > self._limit:
            for _, buffer in self._generations.pop(0):
                self._release(buffer)

    def close(self) -> None:
        """Drop everything; calling it twice is safe."""
        generations, self._generations = self._generations, []
        for generation in generations:
            for _, buffer in generation:
                self._release(buffer)
