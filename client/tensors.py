"""numpy arrays to Triton's tensors and back; both protocols use the same rules.

| numpy | Triton |
|---|---|
| bool, (u)int8..64, float16, float32, float64 | BOOL, (U)INT8..64, FP16, FP32, FP64 |
| `ml_dtypes.bfloat16` | BF16 |
| object arrays of `bytes` or `str`, `S` and `U` arrays | BYTES (text as UTF-8; answers are `bytes`) |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from tritonclient.utils import np_to_triton_dtype

from client.errors import InvalidInput

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True)
class Tensor:
    """A named array with Triton's name of its dtype."""

    name: str
    datatype: str
    array: Array


def encode(inputs: Mapping[str, Array]) -> list[Tensor]:
    """Check and convert the inputs of a request. Raises InvalidInput that names the input."""
    return [_encode(name, array) for name, array in inputs.items()]


def _encode(name: str, array: Array) -> Tensor:
    if not isinstance(array, np.ndarray):
        raise InvalidInput(
            f"input '{name}' must be a numpy array, got {type(array).__name__}; use np.array(..., dtype)"
        )
    if array.dtype.kind in "OU":
        array = _encode_text(name, array)
    elif not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    datatype = np_to_triton_dtype(array.dtype)
    if datatype is None:
        raise InvalidInput(f"input '{name}' has dtype {array.dtype}, which Triton does not have; convert it first")
    return Tensor(name, datatype, array)


def _encode_text(name: str, array: Array) -> Array:
    encoded = np.empty(array.shape, np.object_)
    flat = encoded.reshape(-1)
    for index, element in enumerate(array.ravel()):
        if not isinstance(element, (str, bytes)):
            raise InvalidInput(f"input '{name}' must hold str or bytes, got {type(element).__name__} at {index}")
        flat[index] = element.encode() if isinstance(element, str) else element
    return encoded


def infer_inputs(module: ModuleType, tensors: Iterable[Tensor]) -> list[Any]:
    """tritonclient's InferInput objects; `module` is tritonclient.http or tritonclient.grpc."""
    made = []
    for tensor in tensors:
        infer_input = module.InferInput(tensor.name, list(tensor.array.shape), tensor.datatype)
        made.append(infer_input.set_data_from_numpy(tensor.array))
    return made


def requested_outputs(module: ModuleType, names: Sequence[str] | None) -> list[Any] | None:
    """tritonclient's InferRequestedOutput objects; None asks for all outputs."""
    if names is None:
        return None
    if isinstance(names, str) or not names:
        raise InvalidInput(f"outputs must be a list of at least one name, or None for all, got {names!r}")
    return [module.InferRequestedOutput(name) for name in names]


@dataclass(frozen=True)
class OutputInfo:
    """What the server says of one output of an answer."""

    name: str
    datatype: str
    shape: tuple[int, ...]


def output_infos(result: Any) -> list[OutputInfo]:
    """The outputs of a tritonclient InferResult, of either protocol."""
    response = result.get_response()
    if isinstance(response, dict):
        return [
            OutputInfo(each["name"], each["datatype"], tuple(each["shape"])) for each in response.get("outputs", ())
        ]
    return [OutputInfo(each.name, each.datatype, tuple(each.shape)) for each in response.outputs]


def decode(result: Any) -> dict[str, Array]:
    """All outputs of an answer, in the server's order. Read-only where they borrow the answer's bytes."""
    return {info.name: result.as_numpy(info.name) for info in output_infos(result)}
