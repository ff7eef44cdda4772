"""The engine as a whole: a batch of requests goes in, each one's own answer or error comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper

from ortgraph import ConfigError, Engine, ModelError, RequestError
from ortgraph.batch import Request
from ortgraph.config import TensorConfig
from ortgraph.errors import CancelledRequest, CaptureError, InvalidRequest, UnsupportedRequest
from ortgraph.providers.cpu import CpuProvider
from tests import toys
from tests.toys import BF16, BOOL, F32, I32, I64, TEXT, alone, dtype_of, model, plain, refused, run_batch

Inputs = dict[str, Any]


@pytest.fixture
def encoder(tmp_path: Path) -> Engine:
    """Ids and mask of any length, at most 8 rows, padded."""
    return toys.load(toys.encoder(), tmp_path, max_batch_size=8, ragged=("ids", "mask"))


def text(rows: int, length: int, seed: int = 0) -> Inputs:
    ids = np.random.default_rng(seed).integers(0, toys.VOCABULARY, (rows, length))
    return {"ids": ids, "mask": np.ones((rows, length), np.int64)}


def assert_right(answers: list[Any], batch: list[Inputs], made: onnx.ModelProto) -> None:
    session = plain(made)
    for answer, inputs in zip(answers, batch, strict=True):
        for name, wanted in alone(session, inputs).items():
            assert answer[name].shape == wanted.shape
            np.testing.assert_allclose(answer[name], wanted, rtol=1e-5, atol=1e-6)


def counter(engine: Engine, name: str, **labels: str) -> float:
    return engine.metrics.values().get((name, tuple(labels.items())), 0.0)


def is_error(answer: Any, kind: type[RequestError], message: str) -> bool:
    assert type(answer) is kind and str(answer) == message, repr(answer)
    return True


def test_requests_of_different_lengths_get_their_own_answers(encoder: Engine) -> None:
    batch = [text(1, 4, 1), text(3, 2, 2), text(2, 4, 3), text(1, 1, 4)]
    assert_right(run_batch(encoder, batch), batch, toys.encoder())
    assert counter(encoder, "ortgraph_requests_total", outcome="answered") == 4


def test_requests_of_one_length_run_as_one_group(encoder: Engine) -> None:
    batch = [text(1, 4, seed) for seed in range(8)]
    assert_right(run_batch(encoder, batch), batch, toys.encoder())
    assert counter(encoder, "ortgraph_group_rows_count") == 1
    assert counter(encoder, "ortgraph_group_rows_sum") == 8
    assert counter(encoder, "ortgraph_group_requests_sum") == 8
    assert counter(encoder, "ortgraph_real_elements_total") == 64
    assert counter(encoder, "ortgraph_padded_elements_total") == 0
    assert counter(encoder, "ortgraph_eager_runs_total", reason="provider_cpu") == 1


def test_more_rows_than_fit_are_spread_over_groups(encoder: Engine) -> None:
    batch = [text(5, 3, 1), text(5, 3, 2), text(3, 3, 3), text(8, 3, 4)]
    assert_right(run_batch(encoder, batch), batch, toys.encoder())
    assert counter(encoder, "ortgraph_group_rows_sum") == 21
    assert counter(encoder, "ortgraph_group_rows_bucket", le="8") == counter(encoder, "ortgraph_group_rows_count")


def test_one_bad_request_fails_alone(encoder: Engine) -> None:
    """An index outside the table makes the whole group's run fail; each is run again by itself."""
    batch = [text(1, 3, 1), text(1, 3, 2), text(1, 3, 3)]
    batch[1]["ids"][0, 1] = toys.VOCABULARY
    answers = run_batch(encoder, batch)
    assert type(answers[1]) is InvalidRequest and answers[1].status == "INVALID_ARG"
    assert str(answers[1]).startswith("the model cannot run this request: Non-zero status code returned while running")
    assert "indices element out of data bounds, idx=50 must be within the inclusive range [-50,49]" in str(answers[1])
    assert "\n" not in str(answers[1])
    assert_right([answers[0], answers[2]], [batch[0], batch[2]], toys.encoder())
    assert counter(encoder, "ortgraph_eager_runs_total", reason="group_failed") == 3
    assert counter(encoder, "ortgraph_group_rows_count") == 4


def test_a_bad_request_by_itself_gets_its_error(encoder: Engine) -> None:
    bad = text(1, 3)
    bad["ids"][0, 0] = -51
    with pytest.raises(InvalidRequest, match=r"^the model cannot run this request: .* idx=-51 must be within"):
        encoder.run(bad)
    assert_right([encoder.run(text(1, 3))], [text(1, 3)], toys.encoder())


def test_requests_with_errors_are_passed_on_in_their_places(encoder: Engine) -> None:
    error = UnsupportedRequest("lies on the GPU")
    batch = [text(1, 2, 1), text(2, 2, 2)]
    answers = encoder.run_batch([error, Request(batch[0]), error, Request(batch[1]), InvalidRequest("no")])
    assert answers[0] is error and answers[2] is error
    assert is_error(answers[4], InvalidRequest, "no")
    assert_right([answers[1], answers[3]], batch, toys.encoder())
    assert counter(encoder, "ortgraph_requests_total", outcome="refused") == 3
    assert counter(encoder, "ortgraph_requests_total", outcome="answered") == 2


def test_an_empty_batch_has_no_answers(encoder: Engine) -> None:
    assert encoder.run_batch([]) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"idz": np.zeros((1, 2), np.int64)}, "unknown input 'idz'; did you mean 'ids'?"),
        ({"ids": np.zeros((1, 2), np.int32)}, "input 'ids' expects INT64, got int32"),
        ({"ids": np.zeros((1, 2), np.float32)}, "input 'ids' expects INT64, got float32"),
        ({"ids": np.zeros((1, 2, 1), np.int64)}, "input 'ids' expects 2 axes, got shape [1, 2, 1]"),
        ({"ids": np.zeros(2, np.int64)}, "input 'ids' expects 2 axes, got shape [2]"),
        ({"ids": np.zeros(1, np.int64)}, "input 'ids' expects 2 axes, got shape [1]"),
        ({"ids": None}, "input 'ids' is missing and has no value in default_values"),
        (
            {"ids": np.zeros((9, 2), np.int64), "mask": np.ones((9, 2), np.int64)},
            "9 rows are more than max_batch_size 8",
        ),
    ],
)
def test_a_request_that_breaks_a_rule_is_refused_alone(encoder: Engine, change: Inputs, message: str) -> None:
    bad = {name: value for name, value in {**text(1, 2), **change}.items() if value is not None}
    answers = run_batch(encoder, [text(1, 2, 7), bad, text(1, 2, 8)])
    assert is_error(answers[1], InvalidRequest, message)
    assert_right([answers[0], answers[2]], [text(1, 2, 7), text(1, 2, 8)], toys.encoder())


def test_fixed_axes_are_checked(tmp_path: Path) -> None:
    made = model([helper.make_node("Relu", ["x"], ["y"])], [("x", F32, ["n", 3, "w"])], [("y", F32, ["n", 3, "w"])])
    engine = toys.load(made, tmp_path, max_batch_size=4)
    with refused(InvalidRequest, "input 'x' expects 3 on axis 1, got shape [1, 4, 5]"):
        engine.run({"x": np.zeros((1, 4, 5), np.float32)})


def test_only_the_requested_outputs_are_given(encoder: Engine) -> None:
    batch = [Request(text(1, 3, 1), ("mean",)), Request(text(1, 3, 2)), Request(text(1, 3, 3), ("hidden",))]
    answers = encoder.run_batch(batch)
    assert [list(answer) for answer in answers] == [["mean"], ["hidden", "mean"], ["hidden"]]
    assert_right([answers[1]], [text(1, 3, 2)], toys.encoder())
    assert list(encoder.run(text(1, 3), ["mean"])) == ["mean"]
    with refused(InvalidRequest, "unknown output 'men'; did you mean 'mean'?"):
        encoder.run(text(1, 3), ["men"])


def test_outputs_left_out_of_the_config_are_not_offered(tmp_path: Path) -> None:
    path = toys.save(toys.encoder(), tmp_path)
    served = TensorConfig("mean", dtype_of("tensor(float)"), (4,))
    engine = Engine.load(toys.config(path, max_batch_size=8, outputs=(served,)))
    assert list(engine.run(text(1, 3))) == ["mean"]
    with refused(InvalidRequest, "unknown output 'hidden'; known: mean"):
        engine.run(text(1, 3), ["hidden"])


def test_cancelled_requests_are_not_run(encoder: Engine) -> None:
    batch = [Request(text(1, 2, 1)), Request(text(1, 2, 2), is_cancelled=lambda: True), Request(text(1, 2, 3))]
    answers = encoder.run_batch(batch)
    assert is_error(answers[1], CancelledRequest, "the request was cancelled before it ran")
    assert answers[1].status == "CANCELLED"
    assert_right([answers[0], answers[2]], [text(1, 2, 1), text(1, 2, 3)], toys.encoder())
    assert counter(encoder, "ortgraph_group_rows_sum") == 2


def test_absent_inputs_get_their_default(tmp_path: Path) -> None:
    engine = toys.load(toys.encoder(), tmp_path, max_batch_size=8, ragged=("ids", "mask"), default_values={"mask": 1.0})
    batch = [text(1, 3, 1), {"ids": text(2, 5, 2)["ids"]}, text(1, 5, 3)]
    assert_right(run_batch(engine, batch), [text(1, 3, 1), text(2, 5, 2), text(1, 5, 3)], toys.encoder())
    with refused(InvalidRequest, "input 'ids' is missing and has no value in default_values"):
        engine.run({"mask": np.ones((1, 2), np.int64)})


def test_a_default_needs_a_size(tmp_path: Path) -> None:
    made = model([helper.make_node("Relu", ["x"], ["y"])], [("x", F32, ["n", "w"])], [("y", F32, ["n", "w"])])
    engine = toys.load(made, tmp_path, max_batch_size=4, default_values={"x": 1.0})
    with refused(InvalidRequest, "input 'x' is missing and no other input gives its size"):
        engine.run({})


def overridable(shape: list[int]) -> onnx.ModelProto:
    """y = x * scale, where scale has an initial value of 2 that a request may override."""
    return model(
        [helper.make_node("Mul", ["x", "scale"], ["y"])],
        [("x", F32, ["n", 2]), ("scale", F32, shape)],
        [("y", F32, ["n", 2])],
        {"scale": np.full(shape, 2, np.float32)},
    )


@pytest.mark.parametrize("shape", [[], [1], [2]])
def test_an_optional_input_without_rows_runs_alone(tmp_path: Path, shape: list[int]) -> None:
    """Another request's scale must not touch this one's rows."""
    made = overridable(shape)
    engine = toys.load(made, tmp_path, max_batch_size=8)
    x = np.array([[1, 2], [3, 4]], np.float32)
    scales = [None, 3, 5, None, 7]
    batch = [{"x": x} if s is None else {"x": x, "scale": np.full(shape, s, np.float32)} for s in scales]
    answers = run_batch(engine, batch)
    for answer, scale in zip(answers, scales, strict=True):
        np.testing.assert_array_equal(answer["y"], x * (scale or 2))
    assert counter(engine, "ortgraph_group_rows_count") == 4


def test_zero_rows(encoder: Engine) -> None:
    batch = [text(0, 3), text(2, 3, 1), text(0, 5)]
    answers = run_batch(encoder, batch)
    assert answers[0]["hidden"].shape == (0, 3, 4) and answers[0]["mean"].shape == (0, 4)
    assert answers[2]["hidden"].shape == (0, 5, 4)
    assert_right(answers, batch, toys.encoder())


def test_zero_length(tmp_path: Path) -> None:
    engine = toys.load(toys.affine(), tmp_path, max_batch_size=8, ragged=("x",))
    x = np.ones((2, 3), np.float32)
    answers = run_batch(engine, [{"x": np.zeros((2, 0), np.float32)}, {"x": x}, {"x": np.zeros((1, 0), np.float32)}])
    assert answers[0]["y"].shape == (2, 0) and answers[2]["y"].shape == (1, 0)
    np.testing.assert_array_equal(answers[1]["y"], 2 * x)


def test_scalars_may_come_as_one_element(tmp_path: Path) -> None:
    """Triton has no scalars (silero-vad's `sr`)."""
    engine = toys.load(toys.grid(), tmp_path)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for scalar in (np.float32(3), np.array([3], np.float32)):
        answer = engine.run({"x": x, "s": scalar})
        np.testing.assert_array_equal(answer["scaled"], 3 * x)
        np.testing.assert_array_equal(answer["rows"], [3, 12])
    with refused(InvalidRequest, "input 's' expects 0 axes, got shape [2]"):
        engine.run({"x": x, "s": np.zeros(2, np.float32)})


def test_a_scalar_output(tmp_path: Path) -> None:
    made = model([helper.make_node("ReduceSum", ["x"], ["y"], keepdims=0)], [("x", F32, ["n"])], [("y", F32, [])])
    answer = toys.load(made, tmp_path).run({"x": np.array([1, 2, 3], np.float32)})
    assert answer["y"].shape == () and answer["y"] == 6


def test_axes_that_disagree_run_as_onnxruntime_would(tmp_path: Path) -> None:
    """A size of 1 broadcasts; one name for two sizes is what real models have. Never padded, never joined."""
    made = model(
        [helper.make_node("Mul", ["a", "b"], ["y"])],
        [("a", F32, ["n", "w"]), ("b", F32, ["n", "w"])],
        [("y", F32, ["n", "w"])],
    )
    engine = toys.load(made, tmp_path, max_batch_size=8, ragged=("a", "b"))
    one, three = np.full((1, 1), 2, np.float32), np.array([[1, 2, 3]], np.float32)
    batch = [{"a": three, "b": three}, {"a": three, "b": one}, {"a": one, "b": three}, {"a": three, "b": three}]
    answers = run_batch(engine, batch)
    assert [answer["y"].tolist() for answer in answers] == [[[1, 4, 9]], [[2, 4, 6]], [[2, 4, 6]], [[1, 4, 9]]]
    bad = {"a": three, "b": np.ones((1, 2), np.float32)}
    with pytest.raises(InvalidRequest, match=r"^the model cannot run this request: .* axis == 1 \|\| axis == largest"):
        engine.run(bad)


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_that_disagree_are_no_ones_rows(tmp_path: Path, rows: int) -> None:
    made = model(
        [helper.make_node("Mul", ["a", "b"], ["y"])], [("a", F32, ["n"]), ("b", F32, ["n"])], [("y", F32, ["n"])]
    )
    engine = toys.load(made, tmp_path, max_batch_size=8)
    a, b = np.full(rows, 2, np.float32), np.arange(4 - rows, dtype=np.float32)
    answers = run_batch(engine, [{"a": a, "b": a}, {"a": a, "b": b}, {"a": a, "b": a}])
    np.testing.assert_array_equal(answers[1]["y"], a * b)
    np.testing.assert_array_equal(answers[0]["y"], a * a)
    np.testing.assert_array_equal(answers[2]["y"], a * a)


def test_value_ranges_refuse_before_the_run(tmp_path: Path) -> None:
    """On a device an index outside its table would read foreign memory."""
    engine = toys.load(
        toys.encoder(), tmp_path, max_batch_size=8, ragged=("ids", "mask"), value_ranges={"ids": (0.0, 49.0)}
    )
    batch = [text(1, 3, 1), text(1, 3, 2), text(2, 4, 3)]
    batch[1]["ids"][0, 2] = -1
    answers = run_batch(engine, batch)
    assert is_error(answers[1], InvalidRequest, "input 'ids' has values outside 0..49, its range in value_ranges")
    assert_right([answers[0], answers[2]], [batch[0], batch[2]], toys.encoder())


@pytest.mark.parametrize("pad", [0.0, 1.0])
def test_a_pad_value_outside_the_range_harms_no_request(tmp_path: Path, pad: float) -> None:
    engine = toys.load(
        toys.encoder(),
        tmp_path,
        max_batch_size=8,
        ragged=("ids", "mask"),
        value_ranges={"ids": (1.0, 49.0)},
        pad_values={"ids": pad},
    )
    batch = [{**text(1, n, n), "ids": np.full((1, n), n)} for n in (3, 4, 5)]
    assert_right(run_batch(engine, batch), batch, toys.encoder())


def test_nan_is_in_no_range(tmp_path: Path) -> None:
    engine = toys.load(toys.affine(), tmp_path, max_batch_size=4, value_ranges={"x": (-1.0, 1.0)})
    bad = {"x": np.array([[0.5, np.nan]], np.float32)}
    good = {"x": np.array([[0.5, -0.5]], np.float32)}
    answers = run_batch(engine, [good, bad, good])
    assert is_error(answers[1], InvalidRequest, "input 'x' has values outside -1..1, its range in value_ranges")
    assert answers[0]["y"].tolist() == answers[2]["y"].tolist() == [[1, -1]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pad_values": {"id": 0.0}}, "parameter 'pad_values': the model has no input 'id'; did you mean 'ids'?"),
        ({"pad_values": {"ids": 0.5}}, "parameter 'pad_values': 0.5 does not fit input 'ids' of type INT64"),
        ({"pad_values": {"ids": float("nan")}}, "parameter 'pad_values': nan does not fit input 'ids' of type INT64"),
        ({"pad_values": {"ids": float("inf")}}, "parameter 'pad_values': inf does not fit input 'ids' of type INT64"),
        (
            {"default_values": {"mask": 1e30}},
            "parameter 'default_values': 1e+30 does not fit input 'mask' of type INT64",
        ),
        ({"value_ranges": {"ids": (0.0, 1.5)}}, "parameter 'value_ranges': 1.5 does not fit input 'ids' of type INT64"),
        (
            {"buckets": {"lenght": (1, 2)}},
            "parameter 'buckets': the model has no dynamic dimension 'lenght'; known: batch, sequence",
        ),
    ],
)
def test_settings_that_do_not_fit_the_model_refuse_it(tmp_path: Path, fields: Inputs, message: str) -> None:
    with refused(ConfigError, message):
        toys.load(toys.encoder(), tmp_path, max_batch_size=8, **fields)


def test_a_pad_value_that_its_type_cannot_hold_is_refused(tmp_path: Path) -> None:
    with refused(ConfigError, "parameter 'pad_values': 70000 does not fit input 'x' of type FP16"):
        toys.load(toys.affine(toys.F16), tmp_path, max_batch_size=8, pad_values={"x": 70000.0})
    engine = toys.load(
        toys.affine(toys.F16), tmp_path, max_batch_size=8, pad_values={"x": float("-inf")}, ragged=("x",)
    )
    batch = [{"x": np.ones((1, n), np.float16)} for n in (2, 3)]
    assert [answer["y"].tolist() for answer in run_batch(engine, batch)] == [[[2, 2]], [[2, 2, 2]]]


def test_an_input_that_is_also_an_output_is_not_overwritten_by_the_next_run(tmp_path: Path) -> None:
    """onnxruntime hands such an output back as the very memory it was given: the slot's."""
    x: toys.Tensor = ("x", F32, ["n", "w"])
    made = model([helper.make_node("Neg", ["x"], ["y"])], [x], [x, ("y", F32, ["n", "w"])])
    engine = toys.load(made, tmp_path, max_batch_size=8, ragged=("x",))
    first = run_batch(engine, [{"x": np.full((1, 2), n, np.float32)} for n in (1, 2)])
    run_batch(engine, [{"x": np.full((1, 2), n, np.float32)} for n in (8, 9)])
    assert [answer["x"].tolist() for answer in first] == [[[1, 1]], [[2, 2]]]
    mine = np.ones((1, 2), np.float32)
    answer = engine.run({"x": mine})
    mine[:] = 5
    assert answer["x"].tolist() == [[1, 1]]


def test_answers_stay_right_after_later_runs(encoder: Engine) -> None:
    batch = [text(1, 3, 1), text(2, 4, 2)]
    answers = run_batch(encoder, batch)
    for seed in range(5):
        run_batch(encoder, [text(2, 4, seed), text(1, 9, seed)])
    assert_right(answers, batch, toys.encoder())


def unaligned(array: Any) -> Any:
    """The same values at an odd address, as DLPack may give them."""
    moved = np.frombuffer(b"\0" + array.tobytes(), array.dtype, array.size, offset=1).reshape(array.shape)
    assert not moved.flags.aligned
    return moved


def test_unaligned_memory_is_copied(tmp_path: Path) -> None:
    made = overridable([1])
    engine = toys.load(made, tmp_path, max_batch_size=8)
    x, scale = np.array([[1, 2], [3, 4]], np.float32), np.array([3], np.float32)
    batch = [{"x": x}, {"x": x, "scale": scale}, {"x": x[:1]}]
    answers = run_batch(engine, [{name: unaligned(array) for name, array in inputs.items()} for inputs in batch])
    for answer, factor, rows in zip(answers, (2, 3, 2), (2, 2, 1), strict=True):
        np.testing.assert_array_equal(answer["y"], factor * x[:rows])
    assert_right([engine.run({"x": unaligned(x)})], [{"x": x}], made)


def test_axes_that_disagree_in_unaligned_memory(tmp_path: Path) -> None:
    made = model(
        [helper.make_node("Mul", ["a", "b"], ["y"])],
        [("a", F32, ["n", "w"]), ("b", F32, ["n", "w"])],
        [("y", F32, ["n", "w"])],
    )
    engine = toys.load(made, tmp_path, max_batch_size=8, ragged=("a", "b"))
    a, b = np.array([[1, 2, 3]], np.float32), np.array([[2]], np.float32)
    (answer,) = run_batch(engine, [{"a": unaligned(a), "b": unaligned(b)}])
    assert answer["y"].tolist() == [[2, 4, 6]]


def test_inputs_are_not_written_to(encoder: Engine) -> None:
    batch = [text(1, 3, 1), text(2, 4, 2)]
    for inputs in batch:
        for array in inputs.values():
            array.flags.writeable = False
    assert_right(run_batch(encoder, batch), batch, toys.encoder())
    assert_right([encoder.run(batch[0])], [batch[0]], toys.encoder())


NUMBERS = [
    "float",
    "double",
    "float16",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "bool",
]


@pytest.mark.parametrize("name", NUMBERS)
def test_every_element_type_of_triton_is_joined_padded_and_split(tmp_path: Path, name: str) -> None:
    dtype = dtype_of(f"tensor({name})")
    made = model(
        [helper.make_node("Identity", ["x"], ["y"])],
        [("x", dtype.onnx_id, ["n", "w"])],
        [("y", dtype.onnx_id, ["n", "w"])],
    )
    engine = toys.load(made, tmp_path, max_batch_size=8, ragged=("x",))
    assert engine.findings.padded == [True, True]
    largest = 1 if name == "bool" else 2000 if dtype.is_float else np.iinfo(dtype.storage).max
    batch = [{"x": np.full((rows, width), largest, dtype.storage)} for rows, width in ((1, 3), (2, 4), (0, 4), (1, 0))]
    for answer, inputs in zip(run_batch(engine, batch), batch, strict=True):
        assert answer["y"].dtype == dtype.storage
        np.testing.assert_array_equal(answer["y"], inputs["x"])


def test_bfloat16_and_fp8_are_joined_padded_and_split_as_words(tmp_path: Path) -> None:
    for name, elem_type in (("bfloat16", BF16), ("float8_e4m3fn", onnx.TensorProto.FLOAT8E4M3FN)):
        made = model(
            [
                helper.make_node("Cast", ["x"], ["wide"], to=F32),
                helper.make_node("Cast", ["wide"], ["y"], to=elem_type),
            ],
            [("x", elem_type, ["n", "w"])],
            [("y", elem_type, ["n", "w"])],
            opset_imports=[helper.make_opsetid("", 19)],
        )
        engine = toys.load(made, tmp_path, max_batch_size=8, ragged=("x",))
        assert engine.findings.padded == [True, True]
        values = [np.array(v, getattr(ml_dtypes, name)) for v in ([[0.5, -1.5, 2]], [[1], [-4]])]
        words = engine.signature.inputs[0].dtype.storage
        answers = run_batch(engine, [{"x": value.view(words)} for value in values])
        for answer, value in zip(answers, values, strict=True):
            np.testing.assert_array_equal(answer["y"], value.view(words))
        np.testing.assert_array_equal(engine.run({"x": values[0]})["y"], values[0].view(words))


def strings() -> onnx.ModelProto:
    return model(
        [helper.make_node("StringConcat", ["x", "x"], ["y"])],
        [("x", TEXT, ["n", "w"])],
        [("y", TEXT, ["n", "w"])],
        opset_imports=[helper.make_opsetid("", 20)],
    )


def test_strings_are_joined_padded_and_split(tmp_path: Path) -> None:
    engine = toys.load(strings(), tmp_path, max_batch_size=8, ragged=("x",))
    assert engine.findings.padded == [True, True]
    texts = [[[b"a", "\u00e4\u00f6".encode()]], [[b"", b"b", b"c"], [b"d", b"e", b"f"]]]
    answers = run_batch(engine, [{"x": np.array(text, np.object_)} for text in texts])
    assert answers[0]["y"].tolist() == [["aa", "\u00e4\u00f6\u00e4\u00f6"]]
    assert answers[1]["y"].tolist() == [["", "bb", "cc"], ["dd", "ee", "ff"]]
    assert engine.run({"x": [["x"]]})["y"].tolist() == [["xx"]]


def test_a_string_that_is_not_utf8_is_refused_alone(tmp_path: Path) -> None:
    engine = toys.load(strings(), tmp_path, max_batch_size=8)
    batch = [{"x": np.array([[text]], np.object_)} for text in (b"a", b"\xff", b"b")]
    answers = run_batch(engine, batch)
    assert is_error(answers[1], InvalidRequest, "input 'x': ONNX Runtime takes UTF-8 strings only (invalid start byte)")
    assert answers[0]["y"].tolist() == [["aa"]] and answers[2]["y"].tolist() == [["bb"]]


def test_mixed_element_types_in_one_request(tmp_path: Path) -> None:
    made = model(
        [helper.make_node("Where", ["keep", "x", "other"], ["y"]), helper.make_node("Cast", ["keep"], ["n"], to=I32)],
        [("keep", BOOL, ["b", "w"]), ("x", I64, ["b", "w"]), ("other", I64, ["b", "w"])],
        [("y", I64, ["b", "w"]), ("n", I32, ["b", "w"])],
    )
    engine = toys.load(made, tmp_path, max_batch_size=8, ragged=("keep", "x", "other"))
    batch = [
        {"keep": np.array([[True, False]]), "x": np.array([[1, 2]]), "other": np.array([[3, 4]])},
        {"keep": np.array([[False]]), "x": np.array([[5]]), "other": np.array([[6]])},
    ]
    answers = run_batch(engine, batch)
    assert [answer["y"].tolist() for answer in answers] == [[[1, 4]], [[6]]]
    assert [answer["n"].tolist() for answer in answers] == [[[1, 0]], [[0]]]


def test_batch_need_not_be_the_first_axis_when_max_batch_size_is_0(tmp_path: Path) -> None:
    """silero-vad's state is [2, batch, 128]."""
    made = model(
        [helper.make_node("ReduceSum", ["state", "axes"], ["y"], keepdims=0)],
        [("state", F32, [2, "batch", 3])],
        [("y", F32, ["batch", 3])],
        {"axes": np.array([0])},
    )
    engine = toys.load(made, tmp_path, buckets={"batch": (4, 8)})
    assert engine.table.padded == (True,)
    states = [np.random.default_rng(n).standard_normal((2, n, 3)).astype(np.float32) for n in (1, 4, 5, 9)]
    for answer, state in zip(run_batch(engine, [{"state": s} for s in states]), states, strict=True):
        np.testing.assert_allclose(answer["y"], state[0] + state[1], rtol=1e-6)
    hits = {bucket: counter(engine, "ortgraph_bucket_hits_total", bucket=bucket) for bucket in ("batch=4", "batch=8")}
    assert hits == {"batch=4": 2, "batch=8": 1}


def test_buckets_are_counted_by_name(tmp_path: Path) -> None:
    engine = toys.load(toys.encoder(), tmp_path, max_batch_size=8, buckets={"sequence": (4, 8)})
    for rows, length in ((1, 3), (3, 4), (8, 8), (5, 5), (1, 9)):
        engine.run(text(rows, length))
    found = {
        dict(labels)["bucket"]: value
        for (name, labels), value in engine.metrics.values().items()
        if name == "ortgraph_bucket_hits_total"
    }
    assert found == {
        "batch=1,sequence=4": 1,
        "batch=3,sequence=4": 1,
        "batch=8,sequence=8": 1,
        "batch=6,sequence=8": 1,
    }


def test_two_streams_give_the_same_answers(tmp_path: Path) -> None:
    engine = toys.load(toys.encoder(), tmp_path, max_batch_size=4, ragged=("ids", "mask"), cpu_streams=2)
    batch = [text(1 + seed % 3, 1 + seed * 7 % 40, seed) for seed in range(20)]
    bad = text(1, 3)
    bad["ids"][0, 0] = 99
    answers = run_batch(engine, [*batch, bad])
    assert_right(answers[:-1], batch, toys.encoder())
    assert type(answers[-1]) is InvalidRequest
    engine.close()
    engine.close()


def test_a_model_of_sequences_is_refused_for_serving_and_run_by_tools(tmp_path: Path) -> None:
    sequence = helper.make_tensor_sequence_value_info("s", F32, None)
    graph = helper.make_graph(
        [helper.make_node("SequenceConstruct", ["x", "x"], ["s"])],
        "toy",
        [helper.make_tensor_value_info("x", F32, ["n"])],
        [sequence],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    path = toys.save(made, tmp_path)
    with refused(ModelError, "'s' is seq(tensor(float)); only tensors of known element types can be served"):
        Engine.load(toys.config(path))
    x = np.array([1, 2], np.float32)
    (answer,) = Engine.load(toys.config(path), allow_values=True).run({"x": x}).values()
    assert [item.tolist() for item in answer] == [[1, 2], [1, 2]]


def agreement_error(folder: Path, made: onnx.ModelProto, **fields: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        toys.load(made, folder, **fields)
    return str(caught.value)


def tensor(name: str, ort_type: str, *dims: int) -> TensorConfig:
    return TensorConfig(name, dtype_of(ort_type), dims)


def test_a_config_that_does_not_agree_with_the_model_is_refused(tmp_path: Path) -> None:
    made = toys.encoder()
    ids, mask = tensor("ids", "tensor(int64)", -1), tensor("mask", "tensor(int64)", -1)

    def error(**fields: Any) -> str:
        return agreement_error(tmp_path, made, **{"max_batch_size": 8, **fields})

    assert error(inputs=(ids,)) == "the model's input 'mask' is not in config.pbtxt; add it"
    assert error(inputs=(ids, mask, tensor("maks", "tensor(int64)"))) == (
        "input 'maks' is not in the model; did you mean 'mask'?"
    )
    assert error(inputs=(ids, tensor("mask", "tensor(int32)", -1))) == (
        "input 'mask': data_type is TYPE_INT32, the model has int64; set TYPE_INT64"
    )
    assert error(inputs=(ids, tensor("mask", "tensor(int64)", -1, -1))) == (
        "input 'mask': dims are [-1, -1], the model has [-1] (without the batch axis, since max_batch_size is above 0)"
    )
    assert error(outputs=(tensor("mean", "tensor(float)", 5),)) == (
        "output 'mean': dims are [5], the model has [4] (without the batch axis, since max_batch_size is above 0)"
    )
    assert error(max_batch_size=0, inputs=(ids, mask)) == "input 'ids': dims are [-1], the model has [-1, -1]"


def test_a_default_stands_in_for_an_input_left_out_of_the_config(tmp_path: Path) -> None:
    path = toys.save(toys.encoder(), tmp_path)
    ids = tensor("ids", "tensor(int64)", -1)
    engine = Engine.load(toys.config(path, max_batch_size=8, inputs=(ids,), default_values={"mask": 1.0}))
    assert_right([engine.run({"ids": text(1, 3)["ids"]})], [text(1, 3)], toys.encoder())


def test_a_model_that_cannot_be_batched_is_refused(tmp_path: Path) -> None:
    fixed = model([helper.make_node("Relu", ["x"], ["y"])], [("x", F32, [1, 3])], [("y", F32, [1, 3])])
    assert agreement_error(tmp_path, fixed, max_batch_size=4) == (
        "input 'x' has the fixed size 1 on its first axis, so the model cannot be batched; "
        "set max_batch_size: 0 and give dims with all axes, or export it with a dynamic batch"
    )
    assert agreement_error(tmp_path, toys.grid(), max_batch_size=4) == (
        "input 's' is a scalar and has no batch axis; set max_batch_size: 0"
    )


def test_captures_on_demand_that_cannot_be_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuProvider, "can_capture", True)
    engine = toys.load(toys.affine(), tmp_path, max_batch_size=2, captures_on_demand=2)
    assert engine.notes == ("nothing is captured: the CPU captures no graphs",)
    assert engine.run({"x": np.ones((1, 3), np.float32)})["y"].tolist() == [[2, 2, 2]]
    monkeypatch.setattr("ortgraph.engine.open_provider", CpuProvider)
    with refused(CaptureError, "graph_capture is required, but nothing is captured: the CPU captures no graphs"):
        toys.load(toys.affine(), tmp_path, max_batch_size=2, captures_on_demand=2, graph_capture="required")
