"""The bucket table is total: every size has an answer, every item exactly one group, no group too many rows."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ortgraph.buckets import BucketTable, Group, Item, default_batch_ladder
from ortgraph.signature import Sizes


def area(sizes: Sizes) -> float:
    """A run costs what it computes, and a start of 10."""
    return 10.0 + math.prod(sizes)


def table(**fields: object) -> BucketTable:
    """Batch and length; both padded, tight shapes, at most 8 rows."""
    made = BucketTable(
        ladders=((1, 2, 4, 8), (8, 16, 32)),
        padded=(True, True),
        batch_dim=0,
        max_rows=8,
        has_fixed_shapes=False,
        cost=area,
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def items(*sizes: Sizes) -> list[Item]:
    return [Item(index, size) for index, size in enumerate(sizes)]


def indices(groups: list[Group]) -> list[list[int]]:
    return [[item.place for item in group.items] for group in groups]


def test_fit_is_total_on_every_size_up_to_the_largest_and_one_more() -> None:
    made = table()
    for rows in range(10):
        for length in range(34):
            wanted_rows = next((size for size in (1, 2, 4, 8) if size >= rows), None)
            wanted_length = next((size for size in (8, 16, 32) if size >= length), None)
            has_bucket = wanted_rows is not None and wanted_length is not None
            assert made.fit((rows, length)) == ((wanted_rows, wanted_length) if has_bucket else None)


def test_a_dimension_that_may_not_be_padded_fits_only_exactly() -> None:
    made = table(padded=(True, False))
    for length in range(34):
        assert made.fit((3, length)) == ((4, length) if length in (8, 16, 32) else None)


def test_a_dimension_without_a_ladder_keeps_its_size() -> None:
    made = table(ladders=((1, 2, 4, 8), None))
    for length in range(34):
        assert made.fit((3, length)) == (4, length)


def test_an_unknown_size_fits_no_ladder() -> None:
    assert table().fit((1, -1)) is None
    assert table(ladders=(None, None)).fit((1, -1)) == (1, -1)


def test_tight_groups_run_at_the_largest_of_their_items() -> None:
    groups = table().group(items((1, 5), (2, 7)))
    assert groups == [Group((Item(0, (1, 5)), Item(1, (2, 7))), (3, 7), (4, 8))]


def test_fixed_groups_run_at_their_bucket() -> None:
    groups = table(has_fixed_shapes=True).group(items((1, 5), (2, 7)))
    assert groups == [Group((Item(0, (1, 5)), Item(1, (2, 7))), (4, 8), (4, 8))]


def test_where_no_bucket_is_large_enough_the_run_is_tight() -> None:
    groups = table(has_fixed_shapes=True).group(items((2, 33)))
    assert groups == [Group((Item(0, (2, 33)),), (2, 33), None)]


def test_short_requests_are_not_padded_to_a_far_longer_one() -> None:
    """Four of 2 and one of 100: 10+8 and 10+100 cost less than 10+500."""
    groups = table().group(items((1, 2), (1, 100), (1, 2), (1, 2), (1, 2)))
    assert indices(groups) == [[0, 2, 3, 4], [1]]
    assert [group.sizes for group in groups] == [(4, 2), (1, 100)]


def test_near_lengths_are_padded_together() -> None:
    """10 + 2*9 is less than 20 + 8 + 9."""
    assert indices(table().group(items((1, 9), (1, 8)))) == [[1, 0]]


def test_fixed_shapes_take_two_buckets_where_one_wastes_more() -> None:
    """Nine rows of 8: with starts of 1 a bucket of 8 and one of 1 beat everything else."""
    made = table(has_fixed_shapes=True, cost=lambda sizes: 1.0 + math.prod(sizes), max_rows=16)
    groups = made.group(items(*[(1, 8)] * 9))
    assert sorted(group.sizes for group in groups) == [(1, 8), (8, 8)]


def test_only_equal_keys_share_a_group() -> None:
    made = [Item(0, (1, 4), "x"), Item(1, (1, 4), "y"), Item(2, (1, 4), "x")]
    assert indices(table().group(made)) == [[0, 2], [1]]


def test_sizes_that_may_not_be_padded_are_never_mixed() -> None:
    made = table(padded=(True, False), ladders=((1, 2, 4, 8), None), cost=lambda sizes: 1.0)
    assert indices(made.group(items((1, 4), (1, 5), (1, 4)))) == [[0, 2], [1]]


def test_without_a_batch_everyone_runs_alone() -> None:
    groups = table(batch_dim=None, has_fixed_shapes=True).group(items((3, 4), (3, 4)))
    assert indices(groups) == [[0], [1]]
    assert [group.sizes for group in groups] == [(4, 8), (4, 8)]


def test_what_cannot_join_runs_exact() -> None:
    """Its axes may not agree on its sizes, so there is no shape to pad it to."""
    lone = Item(0, (3, 4), can_join=False)
    groups = table(has_fixed_shapes=True).group([lone, Item(1, (3, 4))])
    assert groups[0] == Group((lone,), (3, 4), None)
    assert groups[1] == Group((Item(1, (3, 4)),), (4, 8), (4, 8))


def test_zero_rows_run_alone() -> None:
    groups = table().group(items((0, 4), (1, 4), (0, 4)))
    assert indices(groups) == [[0], [2], [1]]
    assert groups[0].sizes == (0, 4)
    assert table(has_fixed_shapes=True).group(items((0, 4)))[0].sizes == (1, 8)


def test_a_length_of_zero_runs_exact() -> None:
    """Padding is proven from a length of 1 on."""
    lone = Item(0, (2, 0))
    groups = table(has_fixed_shapes=True).group([lone, Item(1, (2, 4))])
    assert groups[0] == Group((lone,), (2, 0), None)
    assert groups[1].bucket == (2, 8)


def test_no_items_no_groups() -> None:
    assert table().group([]) == []


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 40), st.booleans(), st.sampled_from("ab")), max_size=24),
    st.lists(st.integers(1, 8), min_size=1, max_size=5),
    st.one_of(st.none(), st.lists(st.integers(1, 40), min_size=1, max_size=5)),
    st.booleans(),
    st.booleans(),
    st.floats(0, 100),
)
def test_every_item_is_in_exactly_one_group_that_holds_it(
    drawn: list[tuple[int, int, bool, str]],
    rows_ladder: list[int],
    length_ladder: list[int] | None,
    is_padded: bool,
    has_fixed_shapes: bool,
    start_cost: float,
) -> None:
    made = BucketTable(
        ladders=(tuple(sorted(set(rows_ladder))), tuple(sorted(set(length_ladder))) if length_ladder else None),
        padded=(True, is_padded),
        batch_dim=0,
        max_rows=8,
        has_fixed_shapes=has_fixed_shapes,
        cost=lambda sizes: start_cost + math.prod(sizes),
    )
    given_items = [
        Item(index, (rows, length), key, can_join) for index, (rows, length, can_join, key) in enumerate(drawn)
    ]
    groups = made.group(given_items)
    assert sorted(index for group in indices(groups) for index in group) == list(range(len(given_items)))
    for group in groups:
        rows = sum(item.sizes[0] for item in group.items)
        assert rows <= 8
        assert group.sizes[0] >= rows
        assert len({item.key for item in group.items}) == 1
        assert len(group.items) == 1 or all(item.can_join and min(item.sizes) > 0 for item in group.items)
        for item in group.items:
            assert item.sizes[1] == group.sizes[1] if not is_padded else item.sizes[1] <= group.sizes[1]
        if group.bucket is None or not has_fixed_shapes:
            assert group.sizes == (rows, max(item.sizes[1] for item in group.items))
        else:
            assert group.sizes == group.bucket == made.fit((rows, max(item.sizes[1] for item in group.items)))


@pytest.mark.parametrize(
    ("largest", "preferred", "wanted"),
    [
        (1, (), (1,)),
        (8, (), (1, 2, 3, 4, 6, 8)),
        (32, (), (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32)),
        (33, (), (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 33)),
        (8, (5, 8, 9), (1, 2, 3, 4, 5, 6, 8)),
    ],
)
def test_default_batch_ladder(largest: int, preferred: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    assert default_batch_ladder(largest, preferred) == wanted


def test_the_default_ladder_has_no_holes_and_ends_at_the_maximum() -> None:
    for largest in range(1, 300):
        ladder = default_batch_ladder(largest)
        made = BucketTable((ladder,), (True,), 0, largest, True, area)
        assert ladder[0] == 1 and ladder[-1] == largest
        for rows in range(largest + 1):
            bucket = made.fit((rows,))
            assert bucket is not None and rows <= bucket[0] <= largest
        assert made.fit((largest + 1,)) is None


def test_sizes_that_no_bucket_may_hold_are_taken_exact() -> None:
    """Beyond the largest bucket, or between two where padding is not proven; the other dimension is still padded."""
    made = table(has_fixed_shapes=True, takes_exact=True)
    assert made.fit((3, 33)) == (4, 33)
    assert made.fit((3, 9)) == (4, 16)
    assert made.fit((0, -1)) is None
    unpadded = table(has_fixed_shapes=True, takes_exact=True, padded=(True, False))
    assert unpadded.fit((3, 9)) == (4, 9)
    assert unpadded.fit((3, 16)) == (4, 16)
    groups = unpadded.group(items((1, 9), (2, 9), (1, 16)))
    assert sorted((group.sizes, group.bucket) for group in groups) == [((1, 16), (1, 16)), ((4, 9), (4, 9))]
