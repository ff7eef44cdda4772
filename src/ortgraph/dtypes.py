"""One table of element types: ONNX's, Triton's and how numpy stores them.

numpy has no bfloat16 and no float8; they are moved as raw 16-bit and 8-bit words and never computed with here.
Sources: onnx.TensorProto.DataType for the numbers, Triton's model_config.proto for the TYPE_ names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import InvalidRequest


@dataclass(frozen=True)
class DType:
    """An element type.

    `storage` is the numpy dtype that holds one element, `triton` is None where Triton has no such type,
    `tolerance` is how far two right answers may lie apart, relative to the largest value (0 = equal).
    """

    onnx_name: str
    onnx_id: int
    triton: str | None
    storage: np.dtype[Any]
    tolerance: float = 0.0
    is_raw: bool = False

    @property
    def is_string(self) -> bool:
        """Strings have no fixed size; they travel as numpy object arrays of bytes or str."""
        return self.onnx_name == "string"

    @property
    def is_float(self) -> bool:
        """Random normal values make sense for it."""
        return self.tolerance > 0

    @property
    def short(self) -> str:
        """The name in messages: Triton's where there is one."""
        return (self.triton or self.onnx_name).removeprefix("TYPE_")


_TABLE = (
    DType("float", 1, "TYPE_FP32", np.dtype(np.float32), 1e-4),
    DType("uint8", 2, "TYPE_UINT8", np.dtype(np.uint8)),
    DType("int8", 3, "TYPE_INT8", np.dtype(np.int8)),
    DType("uint16", 4, "TYPE_UINT16", np.dtype(np.uint16)),
    DType("int16", 5, "TYPE_INT16", np.dtype(np.int16)),
    DType("int32", 6, "TYPE_INT32", np.dtype(np.int32)),
    DType("int64", 7, "TYPE_INT64", np.dtype(np.int64)),
    DType("string", 8, "TYPE_STRING", np.dtype(np.object_)),
    DType("bool", 9, "TYPE_BOOL", np.dtype(np.bool_)),
    DType("float16", 10, "TYPE_FP16", np.dtype(np.float16), 1e-2),
    DType("double", 11, "TYPE_FP64", np.dtype(np.float64), 1e-6),
    DType("uint32", 12, "TYPE_UINT32", np.dtype(np.uint32)),
    DType("uint64", 13, "TYPE_UINT64", np.dtype(np.uint64)),
    DType("bfloat16", 16, "TYPE_BF16", np.dtype(np.uint16), 5e-2, is_raw=True),
    DType("float8e4m3fn", 17, None, np.dtype(np.uint8), 1e-1, is_raw=True),
    DType("float8e4m3fnuz", 18, None, np.dtype(np.uint8), 1e-1, is_raw=True),
    DType("float8e5m2", 19, None, np.dtype(np.uint8), 1e-1, is_raw=True),
    DType("float8e5m2fnuz", 20, None, np.dtype(np.uint8), 1e-1, is_raw=True),
)
_BY_ONNX = {d.onnx_name: d for d in _TABLE}
_BY_TRITON = {d.triton: d for d in _TABLE if d.triton}
_RAW_NAMES = {"float8_e4m3fn": "float8e4m3fn", "float8_e5m2": "float8e5m2"} | {
    "float8_e4m3fnuz": "float8e4m3fnuz",
    "float8_e5m2fnuz": "float8e5m2fnuz",
    "bfloat16": "bfloat16",
}


def from_ort(type_name: str) -> DType | None:
    """The type of ONNX Runtime's `tensor(float)`; None for what is no tensor of a known type (a sequence, a map)."""
    if type_name.startswith("tensor(") and type_name.endswith(")"):
        return _BY_ONNX.get(type_name[7:-1])
    return None


def from_triton(name: str) -> DType | None:
    """The type of config.pbtxt's `TYPE_FP32`; None when there is none."""
    return _BY_TRITON.get("TYPE_STRING" if name == "TYPE_BYTES" else name)


def to_float64(values: np.ndarray[Any, Any], dtype: DType) -> np.ndarray[Any, Any]:
    """Values for comparing: bfloat16 and fp8 words become numbers, everything else is cast.

    bfloat16 is the upper half of a float32; fp8 words are compared as words of equal sign and near exponent.
    """
    if dtype.onnx_name == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return values.astype(np.float64)


def as_storage(name: str, values: Any, dtype: DType) -> np.ndarray[Any, Any]:
    """A numpy array of `dtype`'s storage, C-contiguous, from what a caller gave for input `name`.

    Raises:
        InvalidRequest: the element type is another one. Nothing is cast silently.
    """
    array = np.asarray(values)
    if dtype.is_string:
        if array.dtype.kind not in "OSU":
            raise InvalidRequest(f"input '{name}' expects {dtype.short}, got {array.dtype}")
        return array.astype(np.object_)
    if dtype.is_raw and _RAW_NAMES.get(array.dtype.name) == dtype.onnx_name:
        array = array.view(dtype.storage)
    if array.dtype != dtype.storage:
        raise InvalidRequest(f"input '{name}' expects {dtype.short}, got {array.dtype}")
    # ascontiguousarray makes a scalar one-dimensional, so it is asked for only where it is needed.
    return array if array.flags.c_contiguous and array.flags.aligned else np.array(array, order="C", copy=True)
