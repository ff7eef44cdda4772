"""Small model repositories for the real server: ONNX models as text, and the folders Triton reads."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import parser

ONE_LINE = 'backend: "ortgraph"\n'
MODEL_PY = 'from ortgraph.backend import TritonPythonModel\n\n__all__ = ["TritonPythonModel"]\n'
OPSET = 21
IR_VERSION = 10

# Triton's name, ONNX's name in a graph's text.
TYPES = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "FP16": "float16",
    "FP32": "float",
    "FP64": "double",
    "BF16": "bfloat16",
}


def graph(text: str, *, opset: int = OPSET, ir_version: int = IR_VERSION) -> onnx.ModelProto:
    """A model from ONNX's textual form, `(inputs) => (outputs) { nodes }`."""
    header = f'<ir_version: {ir_version}, opset_import: ["" : {opset}]>'
    model: onnx.ModelProto = parser.parse_model(f"{header} tested {text}")
    return model


def echo(types: dict[str, str], shape: str) -> onnx.ModelProto:
    """`out_<type>` is `in_<type>`, for each type, all of this shape."""
    inputs = ", ".join(f"{onnx_type}[{shape}] in_{name}" for name, onnx_type in types.items())
    outputs = ", ".join(f"{onnx_type}[{shape}] out_{name}" for name, onnx_type in types.items())
    nodes = " ".join(f"out_{name} = Identity(in_{name})" for name in types)
    return graph(f"({inputs}) => ({outputs}) {{ {nodes} }}")


def parameter(key: str, value: str) -> str:
    """A line of config.pbtxt."""
    return f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n'


def tensor(kind: str, name: str, data_type: str, dims: list[int], extra: str = "") -> str:
    """An `input` or `output` block of config.pbtxt."""
    return f'{kind} [ {{ name: "{name}" data_type: TYPE_{data_type} dims: {dims} {extra} }} ]\n'


def write(
    repository: Path,
    name: str,
    model: onnx.ModelProto | bytes | None,
    config: str = ONE_LINE,
    *,
    has_model_py: bool = False,
) -> Path:
    """A model's folder. `model` as bytes is written as it is, None leaves the file out; returns the folder."""
    folder = repository / name
    version = folder / "1"
    version.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)
    if model is not None:
        (version / "model.onnx").write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    if has_model_py:
        (version / "model.py").write_text(MODEL_PY)
    return folder
