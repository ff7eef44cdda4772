"""A group's outputs split into each request's own."""

from __future__ import annotations

from typing import Any

import numpy as np

from ortgraph.batch import Request
from ortgraph.buckets import Group, Item
from ortgraph.errors import RunError
from ortgraph.responses import OutputRules, split
from ortgraph.signature import Signature, Sizes, TensorSpec, build
from tests.toys import FP32, refused

NO_RULES = OutputRules({})


def signature(*outputs: str, is_batched: bool = True) -> Signature:
    inputs = [TensorSpec("x", FP32, ("batch", "n"))]
    return build(inputs, [TensorSpec(name, FP32, ("batch", "n")) for name in outputs], is_batched=is_batched)


def answers(
    made: Signature,
    sizes: Sizes,
    items: list[Sizes],
    outputs: dict[str, Any],
    rules: OutputRules = NO_RULES,
    wanted: dict[int, list[str]] | None = None,
) -> dict[int, dict[str, Any]]:
    requests = [Request({}, (wanted or {}).get(i, [])) for i in range(len(items))]
    group = Group(tuple(Item(i, item) for i, item in enumerate(items)), sizes, None)
    found = {}
    for item, arrays in split(group, outputs, requests, made, rules):
        assert item.place not in found
        assert all(array.flags.c_contiguous for array in arrays.values())
        found[item.place] = arrays
    return found


def values(found: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {index: {name: array.tolist() for name, array in arrays.items()} for index, arrays in found.items()}


def test_each_request_gets_its_own_rows_and_no_padding_rows() -> None:
    y = np.arange(8).reshape(4, 2)
    found = answers(signature("y"), (4, 2), [(1, 2), (2, 2)], {"y": y})
    assert values(found) == {0: {"y": [[0, 1]]}, 1: {"y": [[2, 3], [4, 5]]}}


def test_axes_that_follow_a_dimension_are_sliced_others_are_whole() -> None:
    y, mean = np.arange(12).reshape(2, 3, 2), np.array([[1, 2, 3], [4, 5, 6]])
    rules = OutputRules({"y": {1: 1}})
    found = answers(signature("y", "mean"), (2, 3), [(1, 1), (1, 2)], {"y": y, "mean": mean}, rules)
    assert values(found) == {
        0: {"y": [[[0, 1]]], "mean": [[1, 2, 3]]},
        1: {"y": [[[6, 7], [8, 9]]], "mean": [[4, 5, 6]]},
    }


def test_each_request_gets_the_outputs_it_asked_for() -> None:
    outputs = {"y": np.array([[1], [2]]), "z": np.array([[3], [4]])}
    found = answers(signature("y", "z"), (2, 1), [(1, 1), (1, 1)], outputs, wanted={0: ["z"]})
    assert values(found) == {0: {"z": [[3]]}, 1: {"y": [[2]], "z": [[4]]}}


def test_a_single_request_of_the_runs_shape_gets_the_outputs_as_they_are() -> None:
    """Even those without rows: nothing was joined, so nothing has to be split."""
    y = np.float32(3).reshape(())
    assert answers(signature("y"), (2, 3), [(2, 3)], {"y": y})[0]["y"] is y


def test_zero_rows_of_a_padded_run() -> None:
    found = answers(signature("y"), (1, 2), [(0, 2)], {"y": np.ones((1, 2))})
    assert found[0]["y"].shape == (0, 2)


def test_unbatched_outputs_are_sliced_by_the_rules_alone() -> None:
    made = signature("y", "total", is_batched=False)
    outputs = {"y": np.arange(6).reshape(3, 2), "total": np.array(15)}
    found = answers(made, (2, 3), [(1, 2)], outputs, OutputRules({"y": {0: 1, 1: 0}}))
    assert values(found) == {0: {"y": [[0], [2]], "total": 15}}


def test_an_output_without_a_row_for_each_input_row_is_refused() -> None:
    for array, shape in ((np.ones((3, 2)), "[3, 2]"), (np.ones(()), "[]")):
        with refused(
            RunError,
            f"output 'y' has shape {shape} for 2 rows; set max_batch_size: 0 if its first axis is not the batch",
        ):
            answers(signature("y"), (2, 2), [(1, 2), (1, 2)], {"y": array})
