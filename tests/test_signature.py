"""Which axes are one dimension, and how a dimension is addressed."""

from __future__ import annotations

import pytest

from ortgraph.errors import ConfigError
from ortgraph.signature import Dimension, Signature, TensorSpec, build
from tests.toys import FP32, refused

assert FP32 is not None
Axes = list[tuple[str, tuple[int | str | None, ...]]]


def specs(tensors: Axes) -> list[TensorSpec]:
    return [TensorSpec(name, FP32, shape) for name, shape in tensors]


def signature(tensors: Axes, *, is_batched: bool = False, addressed: tuple[str, ...] = ()) -> Signature:
    return build(specs(tensors), [], is_batched=is_batched, addressed=addressed)


def dims(tensors: Axes, *, is_batched: bool = False, addressed: tuple[str, ...] = ()) -> dict[str, list[str]]:
    found = signature(tensors, is_batched=is_batched, addressed=addressed).dims
    return {dim.name: [f"{name}[{axis}]" for name, axis in dim.axes] for dim in found}


def test_axes_of_one_name_are_one_dimension() -> None:
    assert dims([("ids", ("batch", "sequence")), ("mask", ("batch", "sequence")), ("x", (3, "w"))]) == {
        "batch": ["ids[0]", "mask[0]"],
        "sequence": ["ids[1]", "mask[1]"],
        "w": ["x[1]"],
    }


@pytest.mark.parametrize("name", [None, "", "?", "unk__7", "dynamic_axes_1", "None"])
def test_a_name_that_says_nothing_is_not_trusted(name: str | None) -> None:
    assert dims([("x", (name, 3)), ("y", (name,))]) == {"x[0]": ["x[0]"], "y[0]": ["y[0]"]}


def test_a_name_used_twice_in_one_tensor_is_not_trusted_there() -> None:
    """PP-OCR names height and width alike."""
    assert dims([("x", (1, 3, "size", "size")), ("y", ("size",))]) == {
        "x[2]": ["x[2]"],
        "x[3]": ["x[3]"],
        "size": ["y[0]"],
    }


def test_batched_models_have_the_batch_first_whatever_its_name() -> None:
    found = dims([("x", ("N", "n")), ("y", ("M", None)), ("z", (None, "N"))], is_batched=True)
    assert found == {"batch": ["x[0]", "y[0]", "z[0]"], "n": ["x[1]"], "y[1]": ["y[1]"], "N": ["z[1]"]}
    assert next(iter(found)) == "batch"


def test_another_axis_called_batch_is_not_the_batch() -> None:
    assert dims([("x", ("n", "batch"))], is_batched=True) == {"batch": ["x[0]"], "x[1]": ["x[1]"]}


def test_the_batch_can_be_addressed_by_its_name_by_axis_and_as_batch() -> None:
    made = signature([("x", ("N", "n")), ("y", ("M", "n"))], is_batched=True, addressed=("N", "x[0]", "batch"))
    assert {made.index(name) for name in ("batch", "N", "M", "x[0]", "y[0]")} == {0}
    assert made.index("n") == 1


def test_an_addressed_axis_leaves_its_names_dimension() -> None:
    tensors: Axes = [("x", (1, 3, "h", "w")), ("y", ("h", "w"))]
    assert dims(tensors, addressed=("x[3]",)) == {"h": ["x[2]", "y[0]"], "x[3]": ["x[3]"], "w": ["y[1]"]}


@pytest.mark.parametrize("name", ["x[0]", "x[2]", "z[1]"])
def test_only_dynamic_axes_can_be_addressed(name: str) -> None:
    message = f"parameter 'buckets': the model has no dynamic dimension '{name}'"
    with pytest.raises(ConfigError) as caught:
        signature([("x", (1, "w"))], addressed=(name,))
    assert str(caught.value).startswith(message)


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with refused(
        ConfigError, "parameter 'buckets': the model has no dynamic dimension 'sequense'; did you mean 'sequence'?"
    ):
        signature([("x", ("batch", "sequence"))], addressed=("sequense",))


def test_sizes_and_shapes_are_each_others_inverse() -> None:
    made = signature([("x", ("b", 3, "w")), ("y", ("w", "b")), ("s", ())])
    sizes, conflict = made.sizes({"x": (2, 3, 5), "y": (5, 2), "s": ()})
    assert (sizes, conflict) == ((2, 5), "")
    assert [made.shape(spec, sizes) for spec in made.inputs] == [(2, 3, 5), (5, 2), ()]


def test_a_size_of_no_given_input_is_not_known() -> None:
    made = signature([("x", ("b",)), ("y", ("b", "w"))])
    assert made.sizes({"x": (2,)}) == ((2, -1), "")
    assert made.shape(made.inputs[1], (2, -1)) == (2, -1)


def test_axes_that_differ_are_a_conflict_with_the_largest_size() -> None:
    made = signature([("x", ("b", "w")), ("y", ("b", "w"))])
    assert made.sizes({"x": (2, 1), "y": (2, 7)}) == ((2, 7), "dimension 'w' is 1 and, in input 'y', 7")
    assert made.sizes({"x": (2, 7), "y": (2, 1)}) == ((2, 7), "dimension 'w' is 7 and, in input 'y', 1")
    assert made.sizes({"x": (0, 7), "y": (0, 7)}) == ((0, 7), "")


def test_an_optional_input_of_fixed_size_has_no_rows() -> None:
    inputs = [
        TensorSpec("x", FP32, ("n", "w")),
        TensorSpec("scale", FP32, (3,), False),
        TensorSpec("s", FP32, (), False),
    ]
    made = build(inputs, [], is_batched=True)
    assert made.dims == (Dimension("batch", (("x", 0),)), Dimension("w", (("x", 1),)))
    assert made.shape(inputs[1], (8, 5)) == (3,)


def test_a_model_without_dynamic_axes_has_no_dimensions() -> None:
    assert dims([("x", (1, 3)), ("s", ())]) == {}
    assert signature([]).dims == ()


def test_input_by_name() -> None:
    made = signature([("x", ("n",))])
    found = made.input("x")
    assert found is not None and found.shape == ("n",)
    assert made.input("y") is None
