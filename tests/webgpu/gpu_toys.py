"""Small models for WebGPU, and the shortest way to an engine for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from models.encoder import TINY, build
from ortgraph import Engine, parse
from ortgraph.batch import Request
from ortgraph.errors import RequestError
from tests.toys import F32, I64, model

VOCABULARY = TINY.vocab
KERNEL = np.random.default_rng(5).standard_normal((4, 1, 3, 3)).astype(np.float32)
Inputs = dict[str, np.ndarray[Any, Any]]


def encoder() -> onnx.ModelProto:
    """Two layers of fused operators, as the text_embedding sample has them; unit rows."""
    return build(replace(TINY, normalise=True), seed=3)


def convolution() -> onnx.ModelProto:
    """y = r + mean of r over the width, where r = relu(conv 3x3 of x), x [batch, 1, 4, width].

    The mean changes with padding, so that the width is never padded.
    """
    return model(
        [
            helper.make_node("Conv", ["x", "kernel", "bias"], ["c"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["c"], ["r"]),
            helper.make_node("ReduceMean", ["r", "wide"], ["mean"], keepdims=1),
            helper.make_node("Add", ["r", "mean"], ["y"]),
        ],
        [("x", F32, ["batch", 1, 4, "width"])],
        [("y", F32, ["batch", 4, 4, "width"])],
        {"kernel": KERNEL, "bias": np.full(4, 0.5, np.float32), "wide": np.array([3])},
    )


def reshaped() -> onnx.ModelProto:
    """y = -2x with its last two axes joined: the Reshape's target is shape arithmetic on the CPU."""
    return model(
        [
            helper.make_node("Shape", ["x"], ["shape"]),
            helper.make_node("Slice", ["shape", "zero", "one"], ["rows"]),
            helper.make_node("Concat", ["rows", "rest"], ["target"], axis=0),
            helper.make_node("Add", ["x", "x"], ["double"]),
            helper.make_node("Reshape", ["double", "target"], ["flat"]),
            helper.make_node("Neg", ["flat"], ["y"]),
        ],
        [("x", F32, ["batch", "n", 3])],
        [("y", F32, ["batch", "m"])],
        {"zero": np.array([0]), "one": np.array([1]), "rest": np.array([-1])},
    )


def determinant() -> onnx.ModelProto:
    """An operator that the plugin has no kernel for."""
    return model([helper.make_node("Det", ["x"], ["y"])], [("x", F32, ["batch", 2, 2])], [("y", F32, ["batch"])])


def branching() -> onnx.ModelProto:
    """y = -x where the sum of x is positive, else |x|: control flow."""
    branches = [
        helper.make_graph(
            [helper.make_node(op, ["x"], ["z"])], op, [], [helper.make_tensor_value_info("z", F32, ["length"])]
        )
        for op in ("Neg", "Abs")
    ]
    return model(
        [
            helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0),
            helper.make_node("Greater", ["total", "zero"], ["is_positive"]),
            helper.make_node("If", ["is_positive"], ["y"], then_branch=branches[0], else_branch=branches[1]),
        ],
        [("x", F32, ["length"])],
        [("y", F32, ["length"])],
        {"zero": np.float32(0)},
    )


def squeezed() -> onnx.ModelProto:
    """y = the sums of x's rows; the last node only copies."""
    return model(
        [
            helper.make_node("ReduceSum", ["x", "one"], ["sums"], keepdims=1),
            helper.make_node("Squeeze", ["sums", "one"], ["y"]),
        ],
        [("x", F32, ["batch", "n"])],
        [("y", F32, ["batch"])],
        {"one": np.array([1])},
    )


def counted() -> onnx.ModelProto:
    """Whole numbers: y = 3 * ids."""
    return model(
        [helper.make_node("Add", ["ids", "ids"], ["d"]), helper.make_node("Add", ["d", "ids"], ["y"])],
        [("ids", I64, ["batch", "n"])],
        [("y", I64, ["batch", "n"])],
    )


ENCODER_INPUTS = [
    {"name": name, "data_type": "TYPE_INT64", "dims": [-1], "allow_ragged_batch": True}
    for name in ("input_ids", "attention_mask")
]
ENCODER_RANGES = f"input_ids=0..{VOCABULARY - 1}; attention_mask=0..1"


def load(path: Path, provider: str = "webgpu", written: dict[str, Any] | None = None, **parameters: str) -> Engine:
    """An engine; parameters as in config.pbtxt, `__` standing for a dot."""
    texts = {key.replace("__", "."): {"string_value": value} for key, value in parameters.items()}
    texts["execution_provider"] = {"string_value": provider}
    return Engine.load(parse({**(written or {}), "parameters": texts}, model_path=path))


def load_encoder(path: Path, provider: str = "webgpu", rows: int = 4, **parameters: str) -> Engine:
    """The encoder, batched and ragged."""
    parameters = {"value_ranges": ENCODER_RANGES, **parameters}
    return load(path, provider, {"max_batch_size": rows, "input": ENCODER_INPUTS}, **parameters)


def text(rng: np.random.Generator, length: int, rows: int = 1) -> Inputs:
    ids = rng.integers(0, VOCABULARY, (rows, length))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def image(rng: np.random.Generator, width: int, rows: int = 1) -> Inputs:
    return {"x": rng.standard_normal((rows, 1, 4, width), np.float32)}


def assert_equal(engine: Engine, cpu: Engine, batch: Sequence[Inputs], tolerance: float = 1e-4) -> None:
    """Every answer of the batch is the CPU provider's."""
    answers = [e.run_batch([Request(dict(inputs)) for inputs in batch]) for e in (engine, cpu)]
    for got, wanted in zip(*answers, strict=True):
        assert not isinstance(got, RequestError), got
        assert not isinstance(wanted, RequestError), wanted
        for name, array in wanted.items():
            np.testing.assert_allclose(got[name], array, atol=tolerance)


def counter(engine: Engine, name: str, **labels: str) -> float:
    return engine.metrics.values().get((name, tuple(labels.items())), 0.0)


def eager_runs(engine: Engine) -> dict[str, float]:
    """Eager runs since ready, by reason."""
    found = engine.metrics.values().items()
    return {labels[0][1]: value for (name, labels), value in found if name == "ortgraph_eager_runs_total"}
