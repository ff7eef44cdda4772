"""Small ONNX models with known answers, and the shortest way to an engine that serves one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper

from ortgraph import Engine, ModelConfig
from ortgraph.batch import Request
from ortgraph.config import TensorConfig
from ortgraph.dtypes import DType, from_ort
from ortgraph.errors import RequestError

F32, F16, BF16, F64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE
I64, I32, BOOL, TEXT = TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL, TensorProto.STRING
FP32 = from_ort("tensor(float)")
VOCABULARY, WIDTH = 50, 4
# Whole numbers, so that sums are exact in any order and answers can be compared to the bit.
TABLE = np.random.default_rng(3).integers(-8, 9, (VOCABULARY, WIDTH)).astype(np.float32)
Tensor = tuple[str, int, Sequence[int | str | None] | None]


def model(
    nodes: Sequence[NodeProto],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    weights: Mapping[str, Any] | None = None,
    **more: Any,
) -> onnx.ModelProto:
    """A model of opset 18; tensors are (name, type, shape). A weight named as an input may be overridden."""
    graph = helper.make_graph(
        list(nodes),
        "toy",
        [helper.make_tensor_value_info(*tensor) for tensor in inputs],
        [helper.make_tensor_value_info(*tensor) for tensor in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (weights or {}).items()],
    )
    return helper.make_model(graph, **{"opset_imports": [helper.make_opsetid("", 18)], "ir_version": 9, **more})


def affine(elem_type: int = F32) -> onnx.ModelProto:
    """y = x + x, element by element; x is [batch, n]."""
    return model(
        [helper.make_node("Add", ["x", "x"], ["y"])],
        [("x", elem_type, ["batch", "n"])],
        [("y", elem_type, ["batch", "n"])],
    )


def reduce(op: str, axis: int = 1, elem_type: int = F32) -> onnx.ModelProto:
    """y = x + op over one axis of x [batch, n]: along that axis every element hears of all the others."""
    return model(
        [helper.make_node(op, ["x", "axes"], ["r"], keepdims=1), helper.make_node("Add", ["x", "r"], ["y"])],
        [("x", elem_type, ["batch", "n"])],
        [("y", elem_type, ["batch", "n"])],
        {"axes": np.array([axis])},
    )


def encoder() -> onnx.ModelProto:
    """An encoder's shape: ids and mask [batch, sequence]; hidden [batch, sequence, 4] and their masked mean [batch, 4].

    An id outside -50..49 makes the run fail.
    """
    return model(
        [
            helper.make_node("Gather", ["table", "ids"], ["hidden"]),
            helper.make_node("Cast", ["mask"], ["weight"], to=F32),
            helper.make_node("Unsqueeze", ["weight", "last"], ["column"]),
            helper.make_node("Mul", ["hidden", "column"], ["kept"]),
            helper.make_node("ReduceSum", ["kept", "one"], ["sum"], keepdims=0),
            helper.make_node("ReduceSum", ["weight", "one"], ["count"], keepdims=1),
            helper.make_node("Div", ["sum", "count"], ["mean"]),
        ],
        [("ids", I64, ["batch", "sequence"]), ("mask", I64, ["batch", "sequence"])],
        [("hidden", F32, ["batch", "sequence", WIDTH]), ("mean", F32, ["batch", WIDTH])],
        {"table": TABLE, "last": np.array([-1]), "one": np.array([1])},
    )


def grid() -> onnx.ModelProto:
    """No batch: x [height, width] and a scalar s; double = 2x, rows = sums over the width, scaled = x * s."""
    return model(
        [
            helper.make_node("Add", ["x", "x"], ["double"]),
            helper.make_node("ReduceSum", ["x", "one"], ["rows"], keepdims=0),
            helper.make_node("Mul", ["x", "s"], ["scaled"]),
        ],
        [("x", F32, ["height", "width"]), ("s", F32, [])],
        [("double", F32, ["height", "width"]), ("rows", F32, ["height"]), ("scaled", F32, ["height", "width"])],
        {"one": np.array([1])},
    )


def planes() -> onnx.ModelProto:
    """x [batch, high, wide]: double = 2x, sums over wide, and flipped = x with its last two axes exchanged."""
    return model(
        [
            helper.make_node("Add", ["x", "x"], ["double"]),
            helper.make_node("ReduceSum", ["x", "two"], ["sums"], keepdims=0),
            helper.make_node("Transpose", ["x"], ["flipped"], perm=[0, 2, 1]),
        ],
        [("x", F32, ["batch", "high", "wide"])],
        [
            ("double", F32, ["batch", "high", "wide"]),
            ("sums", F32, ["batch", "high"]),
            ("flipped", F32, ["batch", "wide", "high"]),
        ],
        {"two": np.array([2])},
    )


def config(path: Path, **fields: Any) -> ModelConfig:
    """A model's config; `ragged` names the inputs with allow_ragged_batch."""
    ragged = fields.pop("ragged", ())
    made = ModelConfig("toy", "1", path, **fields)
    if not ragged:
        return made
    nodes = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).get_inputs()
    first = 1 if made.max_batch_size else 0
    inputs = tuple(
        TensorConfig(
            node.name,
            dtype_of(node.type),
            tuple(size if isinstance(size, int) else -1 for size in node.shape[first:]),
            is_ragged=node.name in ragged,
        )
        for node in nodes
    )
    return replace(made, inputs=inputs)


def dtype_of(ort_type: str) -> DType:
    dtype = from_ort(ort_type)
    assert dtype is not None
    return dtype


def save(made: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "model.onnx"
    onnx.save(made, path)
    return path


def load(made: onnx.ModelProto, folder: Path, **fields: Any) -> Engine:
    """An engine for the model."""
    return Engine.load(config(save(made, folder), **fields))


def plain(made: onnx.ModelProto) -> ort.InferenceSession:
    """Plain onnxruntime for the same model."""
    return ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])


def alone(session: ort.InferenceSession, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The right answer: this request by itself."""
    names = [node.name for node in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(inputs)), strict=True))


def run_batch(engine: Engine, batch: Sequence[Mapping[str, Any] | RequestError]) -> list[Any]:
    """Answers in order; the requests' dicts are copied, since the engine may add defaults to them."""
    return engine.run_batch([r if isinstance(r, RequestError) else Request(dict(r)) for r in batch])


@contextmanager
def refused(kind: type[Exception], message: str) -> Iterator[None]:
    """The block raises exactly this error with exactly this line."""
    with pytest.raises(kind) as caught:
        yield
    assert type(caught.value) is kind
    assert str(caught.value) == message
