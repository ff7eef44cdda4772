"""What may be joined and padded is proven with the model itself; what is not proven is not done."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from ortgraph import Engine, dtypes
from ortgraph.batch import Fill
from ortgraph.dtypes import DType
from ortgraph.preflight import Preflight, _trial_sizes, worst_error
from ortgraph.signature import TensorSpec, build
from tests import toys
from tests.toys import BF16, F16, F32, I64, TEXT, alone, dtype_of, model, plain, run_batch


def lengths(engine: Engine) -> bool:
    """Whether the dimension after the batch may be padded."""
    return engine.table.padded[1]


def check_batch(engine: Engine, made: onnx.ModelProto, batch: Sequence[dict[str, Any]]) -> None:
    """Every answer equals that of the request alone in plain onnxruntime."""
    session = plain(made)
    for answer, inputs in zip(run_batch(engine, batch), batch, strict=True):
        wanted = alone(session, inputs)
        assert answer.keys() == wanted.keys()
        for name in wanted:
            assert answer[name].shape == wanted[name].shape
            np.testing.assert_allclose(answer[name], wanted[name], rtol=1e-5, atol=1e-6)


def floats(*shapes: tuple[int, ...]) -> list[dict[str, Any]]:
    random = np.random.default_rng(5)
    return [{"x": random.standard_normal(shape).astype(np.float32)} for shape in shapes]


def sum_model(elem_type: int = F32) -> onnx.ModelProto:
    return toys.reduce("ReduceSum", 1, elem_type)


def test_an_elementwise_model_is_joined_and_padded(tmp_path: Path) -> None:
    made = toys.affine()
    engine = toys.load(made, tmp_path, max_batch_size=8, ragged=("x",))
    assert engine.findings.padded == [True, True]
    assert engine.findings.can_join and not engine.findings.notes
    assert engine.findings.axes == {"y": {1: 1}}
    check_batch(engine, made, floats((1, 3), (2, 5), (1, 1)))


def test_a_masked_model_is_padded(tmp_path: Path) -> None:
    engine = toys.load(toys.encoder(), tmp_path, max_batch_size=8, ragged=("ids", "mask"))
    assert engine.findings.padded == [True, True]
    assert engine.findings.axes == {"hidden": {1: 1}, "mean": {}}
    random = np.random.default_rng(1)
    shapes = [(1, 3), (3, 9), (1, 1), (2, 9)]
    batch = [{"ids": random.integers(0, 50, shape), "mask": np.ones(shape, np.int64)} for shape in shapes]
    check_batch(engine, toys.encoder(), batch)


@pytest.mark.parametrize("op", ["ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"])
def test_a_model_whose_answers_padding_changes_is_never_padded(tmp_path: Path, op: str) -> None:
    """Also where only numbers of one sign show it: a maximum of padding with 0."""
    made = toys.reduce(op)
    engine = toys.load(made, tmp_path, max_batch_size=8, ragged=("x",))
    assert engine.findings.padded == [True, False]
    (note,) = engine.findings.notes
    assert note.startswith("dimension 'n' is never padded: output 'y' changes by ")
    check_batch(engine, made, [{"x": -np.abs(r["x"])} for r in floats((1, 3), (2, 5), (1, 1), (1, 5))])


@pytest.mark.parametrize(
    ("op", "pad", "is_safe"),
    [
        ("ReduceSum", 0, True),
        ("ReduceSum", 1, False),
        ("ReduceProd", 1, True),
        ("ReduceMax", -3e38, True),
        ("ReduceMax", 3e38, False),
        ("ReduceMin", 3e38, True),
    ],
)
def test_the_pad_value_decides(tmp_path: Path, op: str, pad: float, is_safe: bool) -> None:
    made = toys.reduce(op)
    engine = toys.load(made, tmp_path, max_batch_size=8, ragged=("x",), pad_values={"x": pad})
    assert lengths(engine) == is_safe
    check_batch(engine, made, floats((1, 3), (2, 5), (1, 1)))


@pytest.mark.parametrize("op", ["ReduceMean", "ReduceMax", "ReduceSum"])
def test_a_batch_coupled_model_is_never_joined(tmp_path: Path, op: str) -> None:
    made = toys.reduce(op, axis=0)
    engine = toys.load(made, tmp_path, max_batch_size=8, ragged=("x",))
    assert engine.table.batch_dim is None
    assert engine.findings.padded[0] is False
    assert engine.findings.notes[0].startswith("requests are never joined: output 'y' of a row changes by ")
    check_batch(engine, made, floats((1, 3), (2, 3), (1, 3)))


@pytest.mark.parametrize(("axis", "is_joined"), [(0, False), (1, True)])
def test_bfloat16_is_measured_with_numbers_not_zeros(tmp_path: Path, axis: int, is_joined: bool) -> None:
    """onnxruntime has few bfloat16 kernels on the CPU: the mean is taken in float32."""
    made = model(
        [
            helper.make_node("Cast", ["x"], ["wide"], to=F32),
            helper.make_node("ReduceMean", ["wide", "axes"], ["m"], keepdims=1),
            helper.make_node("Sub", ["wide", "m"], ["d"]),
            helper.make_node("Cast", ["d"], ["y"], to=BF16),
        ],
        [("x", BF16, ["batch", "n"])],
        [("y", BF16, ["batch", "n"])],
        {"axes": np.array([axis])},
    )
    engine = toys.load(made, tmp_path, max_batch_size=8, ragged=("x",))
    assert engine.findings.can_join is is_joined
    assert lengths(engine) is not is_joined


def test_fp8_is_measured_with_numbers_not_zeros(tmp_path: Path) -> None:
    made = model(
        [
            helper.make_node("Cast", ["x"], ["wide"], to=F32),
            helper.make_node("ReduceMean", ["wide", "axes"], ["m"], keepdims=1),
            helper.make_node("Add", ["wide", "m"], ["y"]),
        ],
        [("x", onnx.TensorProto.FLOAT8E4M3FN, ["batch", "n"])],
        [("y", F32, ["batch", "n"])],
        {"axes": np.array([1])},
        opset_imports=[helper.make_opsetid("", 19)],
    )
    engine = toys.load(made, tmp_path, max_batch_size=8, ragged=("x",))
    assert engine.findings.can_join and not lengths(engine)


def test_a_result_that_is_nan_for_random_numbers_is_measured_all_the_same(tmp_path: Path) -> None:
    """The mean of square roots: NaN beside negative numbers, padded or not, but wrong when padded for positive ones."""
    made = model(
        [
            helper.make_node("Sqrt", ["x"], ["root"]),
            helper.make_node("ReduceMean", ["root", "axes"], ["y"], keepdims=0),
        ],
        [("x", F32, ["batch", "n"])],
        [("y", F32, ["batch"])],
        {"axes": np.array([1])},
    )
    assert not lengths(toys.load(made, tmp_path, max_batch_size=8, ragged=("x",)))


def test_a_coupling_through_the_number_of_words_is_found(tmp_path: Path) -> None:
    """StringSplit fills every row up to the row of most words."""
    made = model(
        [helper.make_node("StringSplit", ["x"], ["y", "count"], delimiter=" ")],
        [("x", TEXT, ["batch"])],
        [("y", TEXT, ["batch", "words"]), ("count", I64, ["batch"])],
        opset_imports=[helper.make_opsetid("", 20)],
    )
    engine = toys.load(made, tmp_path, max_batch_size=8)
    assert not engine.findings.can_join
    found = run_batch(engine, [{"x": np.array(t, np.object_)} for t in (["a b c"], ["a"])])
    assert [answer["y"].tolist() for answer in found] == [[["a", "b", "c"]], [["a"]]]


def test_outputs_that_cannot_be_sliced_back_forbid_padding(tmp_path: Path) -> None:
    """A pool halves the width, as a text recognition model does."""
    made = model(
        [helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[2], strides=[2], ceil_mode=1)],
        [("x", F32, ["batch", 3, "width"])],
        [("y", F32, ["batch", 3, "steps"])],
    )
    engine = toys.load(made, tmp_path, max_batch_size=4, buckets={"width": (8, 16)})
    assert not lengths(engine)
    (note,) = engine.findings.notes
    assert note == (
        "dimension 'width' is never padded: output 'y' has shape [1, 3, 1] at 1, [1, 3, 4] padded to 8, "
        "and cannot be sliced back"
    )
    check_batch(engine, made, floats((1, 3, 8), (2, 3, 7), (1, 3, 8), (1, 3, 30)))


def test_a_flattened_output_forbids_joining(tmp_path: Path) -> None:
    made = model(
        [helper.make_node("Reshape", ["x", "shape"], ["y"])],
        [("x", F32, ["batch", 2])],
        [("y", F32, ["all"])],
        {"shape": np.array([-1])},
    )
    engine = toys.load(made, tmp_path, max_batch_size=4)
    assert engine.findings.notes == ["requests are never joined: output 'y' has shape [6] for 3 rows"]
    found = run_batch(engine, floats((1, 2), (2, 2)))
    assert [answer["y"].shape for answer in found] == [(2,), (4,)]


def test_a_model_that_never_runs_on_trial_is_neither_joined_nor_padded(tmp_path: Path) -> None:
    """A fixed reshape to 11 columns: no trial size fits, but real requests may."""
    made = model(
        [helper.make_node("Reshape", ["x", "shape"], ["r"]), helper.make_node("Add", ["r", "r"], ["y"])],
        [("x", F32, ["batch", "n"])],
        [("y", F32, ["batch", 11])],
        {"shape": np.array([-1, 11])},
    )
    engine = toys.load(made, tmp_path, max_batch_size=4, ragged=("x",))
    assert engine.findings.padded == [False, False]
    assert not engine.findings.can_join and engine.table.batch_dim is None
    assert engine.findings.notes[0].startswith("requests are never joined or padded, since no trial run succeeded: ")
    check_batch(engine, made, floats((1, 11), (2, 11)))


def test_dims_of_the_config_are_the_trial_sizes(tmp_path: Path) -> None:
    """The same model with dims [ 11 ] runs, so its rows are proven to be independent."""
    made = model(
        [helper.make_node("Reshape", ["x", "shape"], ["r"]), helper.make_node("Add", ["r", "r"], ["y"])],
        [("x", F32, ["batch", "n"])],
        [("y", F32, ["batch", 11])],
        {"shape": np.array([-1, 11])},
    )
    path = toys.save(made, tmp_path)
    tensor = toys.TensorConfig("x", dtype_of("tensor(float)"), (11,))
    engine = Engine.load(toys.config(path, max_batch_size=4, inputs=(tensor,)))
    assert engine.findings.can_join and not engine.findings.notes
    check_batch(engine, made, floats((1, 11), (2, 11)))


def test_value_ranges_give_the_trial_values(tmp_path: Path) -> None:
    """Without a range the trial's mask is of any sign and a mean over it proves nothing; with 1..1 it is a mask."""
    made = model(
        [
            helper.make_node("Mul", ["x", "mask"], ["kept"]),
            helper.make_node("ReduceSum", ["kept", "axes"], ["sum"], keepdims=0),
            helper.make_node("ReduceMax", ["mask", "axes"], ["scale"], keepdims=0),
            helper.make_node("Div", ["sum", "scale"], ["y"]),
        ],
        [("x", F32, ["batch", "n"]), ("mask", F32, ["batch", "n"])],
        [("y", F32, ["batch"])],
        {"axes": np.array([1])},
    )
    assert not lengths(toys.load(made, tmp_path, max_batch_size=4, ragged=("x", "mask")))
    engine = toys.load(made, tmp_path, max_batch_size=4, ragged=("x", "mask"), value_ranges={"mask": (1.0, 1.0)})
    assert lengths(engine)


@pytest.mark.parametrize("fields", [{"padding": "off", "ragged": ("x",)}, {}])
def test_padding_is_only_tried_where_it_is_asked_for(tmp_path: Path, fields: dict[str, Any]) -> None:
    made = toys.affine()
    engine = toys.load(made, tmp_path, max_batch_size=8, **fields)
    assert engine.findings.padded == [True, False]
    check_batch(engine, made, floats((1, 3), (2, 5), (1, 3)))


def test_unbatched_axes_are_proven_one_by_one(tmp_path: Path) -> None:
    """Summing over the width is safe with 0; the mean over the height is not."""
    made = model(
        [
            helper.make_node("ReduceSum", ["x", "one"], ["wide"], keepdims=0),
            helper.make_node("ReduceMean", ["x", "zero"], ["high"], keepdims=0),
        ],
        [("x", F32, ["height", "width"])],
        [("wide", F32, ["height"]), ("high", F32, ["width"])],
        {"one": np.array([1]), "zero": np.array([0])},
    )
    engine = toys.load(made, tmp_path, buckets={"height": (4, 8), "width": (4, 8)})
    assert engine.findings.padded == [False, True]
    assert engine.findings.axes == {"wide": {}, "high": {0: 1}}
    assert engine.table.batch_dim is None


def test_half_precision_is_compared_within_its_own_tolerance(tmp_path: Path) -> None:
    engine = toys.load(sum_model(F16), tmp_path, max_batch_size=8, ragged=("x",))
    assert lengths(engine)


@pytest.mark.parametrize(
    ("base", "ladder", "wanted"),
    [
        (8, None, [(1, 8), (7, 8), (9, 17)]),
        (1, None, [(1, 2), (2, 3)]),
        (8, (8, 16, 32), [(1, 8), (9, 16), (17, 32)]),
        (8, (1, 2, 3, 8), [(4, 8)]),
        (8, (1, 4, 8, 16, 32), [(2, 4), (9, 16), (17, 32)]),
        (4, (1, 2, 3), [(2, 3)]),
        (1, (1,), [(1, 2)]),
    ],
)
def test_trial_sizes_waste_most(base: int, ladder: tuple[int, ...] | None, wanted: list[tuple[int, int]]) -> None:
    assert _trial_sizes(base, ladder) == wanted


def dtype(name: str) -> DType:
    return dtype_of(f"tensor({name})")


def test_worst_error() -> None:
    f32, i64, bf16, fp8 = (dtype(name) for name in ("float", "int64", "bfloat16", "float8e4m3fn"))
    a = np.array([1.0, 100.0], np.float32)
    inf = float("inf")
    assert worst_error(a, a, f32) == 0
    assert worst_error(a + np.float32([0, 1]), a, f32) == pytest.approx(0.01)
    assert worst_error(np.float32([0.4]), np.float32([0.5]), f32) == pytest.approx(0.2), "small values count too"
    columns = np.float32([[1e3, 0.5], [2e3, 1.0]])
    assert worst_error(columns + np.float32([0, 0.5]), columns, f32) == pytest.approx(0.25), "a large column hides none"
    assert worst_error(a, a[:1], f32) == inf
    nan = np.array([np.nan, 1], np.float32)
    assert worst_error(nan, nan, f32) == 0
    assert worst_error(nan, a, f32) == inf and worst_error(a, nan, f32) == inf
    infinite = np.array([np.inf, -np.inf], np.float32)
    assert worst_error(infinite, infinite, f32) == 0
    assert worst_error(-infinite, infinite, f32) == inf
    assert worst_error(a[:0], a[:0], f32) == 0
    assert worst_error(np.array([1, 2]), np.array([1, 2]), i64) == 0
    assert worst_error(np.array([1, 3]), np.array([1, 2]), i64) == inf
    assert worst_error(np.array([0x3F80], np.uint16), np.array([0x4000], np.uint16), bf16) == 0.5
    assert worst_error(np.array([1], np.uint8), np.array([2], np.uint8), fp8) == inf


def test_the_cost_grows_with_the_elements_and_is_never_negative(tmp_path: Path) -> None:
    engine = toys.load(toys.encoder(), tmp_path, max_batch_size=8, ragged=("ids", "mask"))
    cost = engine.findings.cost
    assert 0 <= cost((1, 8)) < cost((8, 8)) < cost((8, 512))


def test_padding_that_is_wrong_only_beside_a_longer_row_is_never_done():
    """Each claim holds alone (a row beside another, a size padded), both at once do not."""
    seen: list[tuple[int, ...]] = []

    def run(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        x = inputs["x"]
        seen.append(x.shape)
        is_corner = x.shape[0] == 2 and bool((x[0] == 0).any())
        return {"y": x.sum(axis=1, keepdims=True) + (1 if is_corner else 0)}

    float32 = dtypes.from_triton("TYPE_FP32")
    assert float32
    spec = TensorSpec("x", float32, ("batch", "length"))
    signature = build([spec], [TensorSpec("y", float32, ("batch", 1))], is_batched=True)
    preflight = Preflight(signature, run, {"x": Fill(0.0, None)}, {}, {})
    found = preflight.examine([(1, 2), (4, 8)], [True, True])
    assert found.padded == [True, False]
    assert found.notes == ["nothing is padded: output 'y' changes by " + found.notes[0].split(" by ")[1]]
    assert (2, 4) in seen


@pytest.mark.parametrize(("rounding", "is_joined"), [(0.0, False), (2e-2, True)])
def test_a_gpus_rounding_is_no_change(rounding: float, is_joined: bool) -> None:
    """TF32, or other kernels for other shapes: small against the largest value, not against the smallest column."""

    def run(inputs: dict[str, Any], noise: float = 1e-3) -> dict[str, Any]:
        x = inputs["x"]
        exact = np.concatenate([x[:, :1] * 0 + 1, x.sum(axis=1, keepdims=True) * 1e-2], axis=1)
        return {"y": (exact + noise * len(x)).astype(np.float32)}

    def run_on_the_cpu(inputs: dict[str, Any]) -> dict[str, Any]:
        return run(inputs, 0.0)

    float32 = dtypes.from_triton("TYPE_FP32")
    assert float32
    spec = TensorSpec("x", float32, ("batch", "length"))
    signature = build([spec], [TensorSpec("y", float32, ("batch", 2))], is_batched=True)
    preflight = Preflight(signature, run, {"x": Fill(0.0, None)}, {}, {}, run_checked=run_on_the_cpu, rounding=rounding)
    assert preflight.examine([(1, 2), (4, 8)], [True, False]).can_join is is_joined


def test_as_many_rows_as_may_run_together_are_tried(tmp_path: Path) -> None:
    """y = x + (rows > 20): three rows together say nothing of 32."""
    nodes = [
        helper.make_node("Shape", ["x"], ["rows"], start=0, end=1),
        helper.make_node("Greater", ["rows", "twenty"], ["is_large"]),
        helper.make_node("Cast", ["is_large"], ["more"], to=F32),
        helper.make_node("Add", ["x", "more"], ["y"]),
    ]
    dims = ["batch", "n"]
    made = model(nodes, [("x", F32, dims)], [("y", F32, dims)], {"twenty": np.array([20])})
    assert toys.load(made, tmp_path, max_batch_size=16).findings.can_join
    engine = toys.load(made, tmp_path, max_batch_size=32)
    assert not engine.findings.can_join
    assert engine.findings.notes[0].endswith("beside 31 others")


def test_beyond_the_largest_bucket_nothing_is_padded(tmp_path: Path) -> None:
    """y = x + (length > 100), buckets to 64: a short request is never padded to the length of a long one."""
    nodes = [
        helper.make_node("Shape", ["x"], ["length"], start=1, end=2),
        helper.make_node("Greater", ["length", "hundred"], ["is_long"]),
        helper.make_node("Cast", ["is_long"], ["more"], to=F32),
        helper.make_node("Add", ["x", "more"], ["y"]),
    ]
    dims = ["batch", "n"]
    made = model(nodes, [("x", F32, dims)], [("y", F32, dims)], {"hundred": np.array([100])})
    engine = toys.load(made, tmp_path, max_batch_size=32, ragged=("x",), buckets={"n": (16, 32, 64)})
    assert engine.findings.padded == [True, True]
    check_batch(engine, made, floats((1, 5), (1, 140), (2, 64), (1, 70), (3, 140), (1, 99), (1, 30)))


def test_integers_other_than_0_and_1_are_tried_before_rows_are_joined(tmp_path: Path) -> None:
    """The largest length of the batch scales all, as in sequence masks: with lengths of 1 alone nobody would notice."""
    nodes = [
        helper.make_node("ReduceMax", ["lengths"], ["longest"], keepdims=1),
        helper.make_node("Mul", ["lengths", "longest"], ["y"]),
    ]
    made = model(nodes, [("lengths", I64, ["batch"])], [("y", I64, ["batch"])])
    engine = toys.load(made, tmp_path, max_batch_size=8)
    assert not engine.findings.can_join
    check_batch(engine, made, [{"lengths": np.array([3])}, {"lengths": np.array([5])}])


def test_rows_that_the_model_sorts_are_never_joined(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Shape", ["key"], ["count"]),
        helper.make_node("TopK", ["key", "count"], ["best", "order"], axis=0),
        helper.make_node("Gather", ["x", "order"], ["y"], axis=0),
    ]
    inputs = [("key", I64, ["batch"]), ("x", F32, ["batch", 2])]
    engine = toys.load(model(nodes, inputs, [("y", F32, ["batch", 2])]), tmp_path, max_batch_size=8)
    assert not engine.findings.can_join


def test_negative_numbers_run_alone_where_padding_with_0_would_win(tmp_path: Path) -> None:
    made = toys.reduce("ReduceMax", elem_type=I64)
    engine = toys.load(made, tmp_path, max_batch_size=8, ragged=("x",))
    assert engine.table.padded == (True, True)
    assert engine.findings.unproven == {"negative"}
    rows = [np.array([[-5, -7]]), np.array([[1, 2, 3]]), np.array([[4, 1]])]
    batch = engine.begin([toys.Request({"x": row}) for row in rows])
    assert sorted(len(flight.group.items) for flight in batch.flights) == [1, 2]
    dict(engine.finish(batch))
    check_batch(engine, made, [{"x": row} for row in rows])


def test_a_row_with_nothing_but_masked_runs_alone_where_its_padding_would_count(tmp_path: Path) -> None:
    """Softmax pooling with an additive mask: where all is masked, the padding has the same weight as the rest."""
    nodes = [
        helper.make_node("Cast", ["mask"], ["m"], to=F32),
        helper.make_node("Sub", ["m", "one"], ["m_1"]),
        helper.make_node("Mul", ["m_1", "large"], ["bias"]),
        helper.make_node("Add", ["x", "bias"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["weights"], axis=-1),
        helper.make_node("Mul", ["weights", "x"], ["parts"]),
        helper.make_node("ReduceSum", ["parts", "axes"], ["y"], keepdims=1),
    ]
    inputs = [("x", F32, ["batch", "n"]), ("mask", I64, ["batch", "n"])]
    weights = {"one": np.float32(1), "large": np.float32(10000), "axes": np.array([1])}
    made = model(nodes, inputs, [("y", F32, ["batch", 1])], weights)
    engine = toys.load(made, tmp_path, max_batch_size=8, ragged=("x", "mask"), value_ranges={"mask": (0, 1)})
    assert lengths(engine)
    assert engine.findings.unproven == {"zero"}
    x = [array["x"] for array in floats((1, 3), (1, 6), (1, 4))]
    masks = [np.zeros((1, 3), np.int64), np.ones((1, 6), np.int64), np.ones((1, 4), np.int64)]
    check_batch(engine, made, [{"x": a, "mask": m} for a, m in zip(x, masks, strict=True)])


def test_small_outputs_are_compared_too(tmp_path: Path) -> None:
    """A mean of 1e-5: its error by padding is large against it, however small it is."""
    nodes = [
        helper.make_node("ReduceMean", ["x", "axes"], ["m"], keepdims=1),
        helper.make_node("Mul", ["m", "tiny"], ["y"]),
    ]
    weights = {"axes": np.array([1]), "tiny": np.float32(1e-5)}
    made = model(nodes, [("x", F32, ["batch", "n"])], [("y", F32, ["batch", 1])], weights)
    engine = toys.load(made, tmp_path, max_batch_size=8, ragged=("x",))
    assert not lengths(engine)


def test_an_axis_that_follows_only_beyond_a_size_forbids_padding(tmp_path: Path) -> None:
    """The model pads its output to 8 at least: up to there the axis looks constant."""
    nodes = [
        helper.make_node("Shape", ["x"], ["n"], start=1),
        helper.make_node("Sub", ["eight", "n"], ["missing"]),
        helper.make_node("Max", ["missing", "zero"], ["more"]),
        helper.make_node("Concat", ["zero", "zero", "zero", "more"], ["pads"], axis=0),
        helper.make_node("Pad", ["x", "pads"], ["y"]),
    ]
    weights = {"eight": np.array([8]), "zero": np.array([0])}
    made = model(nodes, [("x", F32, ["batch", "n"])], [("y", F32, ["batch", "m"])], weights)
    engine = toys.load(made, tmp_path, max_batch_size=8, ragged=("x",))
    assert not lengths(engine)
    check_batch(engine, made, floats((1, 3), (1, 16)))


def test_whole_numbers_beyond_2_to_the_53_stay_exact() -> None:
    from ortgraph.config import parse

    written = {"parameters": {"default_values": {"string_value": "k=9007199254740993"}}}
    assert parse(written, model_path=Path("m/1/model.onnx")).default_values == {"k": 9007199254740993}
