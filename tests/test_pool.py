"""Buffers of retired buckets: last in first out, oldest generation dropped, nothing kept at 0."""

from __future__ import annotations

from ortgraph.metrics import Metrics
from ortgraph.pool import BufferPool


class Maker:
    """Numbers instead of device memory; remembers what was freed."""

    def __init__(self, generations: int) -> None:
        self.metrics = Metrics()
        self.made = 0
        self.freed: list[int] = []
        self.pool: BufferPool[int] = BufferPool(generations, self.metrics, self.freed.append)

    def take(self, key: str) -> int:
        return self.pool.take(key, self.make)

    def make(self) -> int:
        self.made += 1
        return self.made

    def counts(self) -> tuple[float, float]:
        values = self.metrics.values()
        return tuple(values.get((f"ortgraph_pool_{kind}_total", ()), 0.0) for kind in ("hits", "misses"))


def test_the_last_buffer_given_back_comes_first() -> None:
    maker = Maker(2)
    one, two, three = (maker.take("a") for _ in range(3))
    maker.pool.give_back([("a", one), ("a", two)])
    maker.pool.give_back([("a", three)])
    assert [maker.take("a") for _ in range(3)] == [three, two, one]
    assert maker.counts() == (3, 3)
    assert len(maker.pool) == 0


def test_only_equal_keys_are_reused() -> None:
    maker = Maker(1)
    maker.pool.give_back([("a", maker.take("a"))])
    assert maker.take("b") == 2
    assert maker.take("a") == 1
    assert maker.counts() == (1, 2)


def test_the_oldest_generation_is_dropped() -> None:
    maker = Maker(1)
    one, two = maker.take("a"), maker.take("b")
    maker.pool.give_back([("a", one), ("b", two)])
    assert maker.freed == []
    maker.pool.give_back([])
    assert maker.freed == []
    maker.pool.give_back([("a", 7)])
    assert maker.freed == [one, two]
    assert maker.take("a") == 7


def test_a_generation_that_was_used_up_counts_no_more() -> None:
    maker = Maker(1)
    maker.pool.give_back([("a", maker.take("a"))])
    maker.take("a")
    maker.pool.give_back([("b", 9)])
    assert maker.freed == []


def test_a_pool_of_no_generations_keeps_nothing() -> None:
    maker = Maker(0)
    maker.pool.give_back([("a", maker.take("a"))])
    assert maker.freed == [1]
    assert len(maker.pool) == 0


def test_closing_drops_everything_once() -> None:
    maker = Maker(3)
    maker.pool.give_back([("a", maker.take("a"))])
    maker.pool.give_back([("b", maker.take("b"))])
    maker.pool.close()
    maker.pool.close()
    assert maker.freed == [1, 2]
