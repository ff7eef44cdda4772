"""Requests gathered into a slot whose memory is poisoned before: every byte of a run is a request's or a pad value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ortgraph.batch import Fill, Request
from ortgraph.buckets import Group, Item
from ortgraph.dtypes import DType, from_ort
from ortgraph.providers.base import Array, Run
from ortgraph.signature import Shape, Signature, Sizes, TensorSpec, build
from ortgraph.staging import stage
from tests.toys import FP32

POISON = 77


class PoisonedSlot:
    """A slot as staging sees it: what it hands out is full of poison."""

    def __init__(self) -> None:
        self.staged: dict[str, Array] = {}
        self.borrowed: dict[str, Array] = {}

    def stage(self, name: str, dtype: DType, shape: Shape) -> Array:
        self.staged[name] = np.full(shape, "poison" if dtype.is_string else POISON, dtype.storage)
        return self.staged[name]

    def borrow(self, name: str, dtype: DType, array: Array) -> None:
        self.borrowed[name] = array

    def launch(self, outputs: Sequence[str], rows: int | None = None) -> Run:
        raise AssertionError("staging starts no runs")


def signature(*inputs: TensorSpec, is_batched: bool = True) -> Signature:
    return build(inputs, [], is_batched=is_batched)


def spec(name: str, *shape: int | str, dtype: str = "float") -> TensorSpec:
    found = from_ort(f"tensor({dtype})")
    assert found is not None
    return TensorSpec(name, found, shape)


def staged(made: Signature, sizes: Sizes, requests: list[dict[str, Any]], pads: dict[str, Any]) -> PoisonedSlot:
    """Stage all requests as one group of these sizes."""
    slot = PoisonedSlot()
    given = [Request(inputs) for inputs in requests]
    items = tuple(Item(i, made.sizes({n: a.shape for n, a in r.items()})[0]) for i, r in enumerate(requests))
    fills = {tensor.name: Fill(pads.get(tensor.name, 0), None) for tensor in made.inputs}
    arrays = stage(slot, Group(items, sizes, None), given, made, fills)
    seen = {**slot.staged, **slot.borrowed}
    assert arrays.keys() == seen.keys() and all(arrays[name] is seen[name] for name in seen)
    return slot


def f32(values: Any) -> Array:
    return np.array(values, np.float32)


def test_rows_follow_each_other_and_short_ones_are_padded() -> None:
    made = signature(spec("x", "batch", "n"), spec("ids", "batch", "n", dtype="int64"))
    slot = staged(
        made,
        (3, 3),
        [
            {"x": f32([[1, 2]]), "ids": np.array([[5, 6]])},
            {"x": f32([[3, 4, 5], [6, 7, 8]]), "ids": np.array([[1, 2, 3], [4, 5, 6]])},
        ],
        {"x": -1, "ids": 9},
    )
    assert slot.staged["x"].tolist() == [[1, 2, -1], [3, 4, 5], [6, 7, 8]]
    assert slot.staged["ids"].tolist() == [[5, 6, 9], [1, 2, 3], [4, 5, 6]]
    assert not slot.borrowed


def test_rows_up_to_the_bucket_are_padded() -> None:
    slot = staged(signature(spec("x", "batch", "n")), (4, 2), [{"x": f32([[1, 2]])}, {"x": f32([[3, 4]])}], {"x": 0.5})
    assert slot.staged["x"].tolist() == [[1, 2], [3, 4], [0.5, 0.5], [0.5, 0.5]]


def test_a_full_group_needs_no_fill() -> None:
    slot = staged(signature(spec("x", "batch", 2)), (2,), [{"x": f32([[1, 2]])}, {"x": f32([[3, 4]])}], {"x": 5})
    assert slot.staged["x"].tolist() == [[1, 2], [3, 4]]


def test_a_single_request_of_the_runs_shape_is_lent_as_it_is() -> None:
    array = f32([[1, 2]])
    slot = staged(signature(spec("x", "batch", "n")), (1, 2), [{"x": array}], {})
    assert slot.borrowed["x"] is array
    assert not slot.staged


def test_an_unaligned_request_of_the_runs_shape_is_copied_with_its_own_shapes() -> None:
    """Even where its axes do not agree, or an optional input has no rows."""
    moved = np.frombuffer(b"\0" + f32([1, 2]).tobytes(), np.float32, 2, offset=1).reshape(1, 2)
    scalar = np.frombuffer(b"\0" + f32(5).tobytes(), np.float32, 1, offset=1).reshape(())
    made = build(
        [TensorSpec("x", FP32, ("n", "w")), TensorSpec("y", FP32, ("n", "w")), TensorSpec("s", FP32, (), False)],
        [],
        is_batched=True,
    )
    slot = staged(made, (1, 3), [{"x": moved, "y": f32([[1, 2, 3]]), "s": scalar}], {})
    assert slot.staged["x"].tolist() == [[1, 2]] and slot.staged["s"].tolist() == 5
    assert slot.borrowed.keys() == {"y"}


def test_a_single_request_is_padded_to_its_bucket() -> None:
    slot = staged(signature(spec("x", "batch", "n")), (2, 3), [{"x": f32([[1, 2]])}], {"x": 4})
    assert slot.staged["x"].tolist() == [[1, 2, 4], [4, 4, 4]]


def test_zero_rows_are_all_padding() -> None:
    slot = staged(signature(spec("x", "batch", "n")), (1, 2), [{"x": np.zeros((0, 2), np.float32)}], {"x": 4})
    assert slot.staged["x"].tolist() == [[4, 4]]


def test_unbatched_inputs_are_padded_on_every_axis_and_scalars_are_copied() -> None:
    """A scalar has no axis to pad; beside a padded input it is staged all the same."""
    made = signature(spec("x", "h", 1, "w"), spec("s"), spec("t", "w", "h"), is_batched=False)
    slot = staged(made, (2, 3), [{"x": f32([[[1, 2]]]), "s": f32(6), "t": f32([[1], [2]])}], {"x": 8, "t": -2})
    assert slot.staged["x"].tolist() == [[[1, 2, 8]], [[8, 8, 8]]]
    assert slot.staged["s"].tolist() == 6
    assert slot.staged["t"].tolist() == [[1, -2], [2, -2], [-2, -2]]


def test_two_ragged_axes_are_padded_apart() -> None:
    made = signature(spec("x", "batch", "h", "w"))
    slot = staged(made, (2, 2, 2), [{"x": f32([[[1], [2]]])}, {"x": f32([[[3, 4]]])}], {"x": 9})
    assert slot.staged["x"].tolist() == [[[1, 9], [2, 9]], [[3, 4], [9, 9]]]


@pytest.mark.parametrize(
    ("dtype", "value", "pad", "wanted"),
    [
        ("bool", [[True]], 1, [[True, True]]),
        ("float16", [[0.5]], -1, [[0.5, -1]]),
        ("uint8", [[255]], 7, [[255, 7]]),
        ("bfloat16", [[0x3F80]], 0, [[0x3F80, 0]]),
        ("string", [[b"a"]], b"", [[b"a", b""]]),
    ],
)
def test_every_kind_of_element_is_padded(dtype: str, value: Any, pad: Any, wanted: Any) -> None:
    made = signature(spec("x", "batch", "n", dtype=dtype))
    array = np.array(value, made.inputs[0].dtype.storage)
    assert staged(made, (1, 2), [{"x": array}], {"x": pad}).staged["x"].tolist() == wanted


def test_an_absent_optional_input_is_not_staged() -> None:
    made = build([TensorSpec("x", FP32, ("n", 1)), TensorSpec("w", FP32, (1,), False)], [], is_batched=True)
    slot = staged(made, (2,), [{"x": f32([[1]])}, {"x": f32([[2]])}], {})
    assert slot.staged.keys() == {"x"}
