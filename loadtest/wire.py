"""HTTP requests made ready to send and answers taken apart, for load clients that must cost little."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadtest.answers import Array

TRITON_DTYPES = {
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "BOOL": np.bool_,
}


@dataclass(frozen=True)
class Shot:
    """One request as bytes, headers and all, and its right answer; `size` is the largest dynamic size in it."""

    request: bytes
    expected: Mapping[str, Array]


class RefusedError(Exception):
    """The server answered with a status other than 200."""


def encode(model: str, inputs: Mapping[str, Array], outputs: Sequence[str]) -> bytes:
    """A whole HTTP request with binary tensors in and out."""
    import tritonclient.http as http  # not in a benchmark's load process: it brings gevent

    tensors = []
    for name, array in inputs.items():
        tensor = http.InferInput(name, list(array.shape), http.np_to_triton_dtype(array.dtype))
        tensors.append(tensor.set_data_from_numpy(array))
    return frame(model, tensors, [http.InferRequestedOutput(name, binary_data=True) for name in outputs])


def frame(model: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> bytes:
    """A whole HTTP request from tritonclient's InferInput and InferRequestedOutput."""
    import tritonclient.http as http

    body, json_size = http.InferenceServerClient.generate_request_body(inputs, outputs=outputs)
    json_size = len(body) if json_size is None else json_size
    head = (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: triton\r\nContent-Type: application/octet-stream\r\n"
        f"Inference-Header-Content-Length: {json_size}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + bytes(body)


def described(status: int, body: memoryview, json_size: int) -> Sequence[Mapping[str, Any]]:
    """The outputs that an answer describes. Raises RefusedError."""
    if status != 200:
        raise RefusedError(f"HTTP {status}: {bytes(body[:200]).decode(errors='replace')}")
    outputs: Sequence[Mapping[str, Any]] = json.loads(bytes(body[:json_size]))["outputs"]
    return outputs


def decode(status: int, body: memoryview, json_size: int) -> dict[str, Array]:
    """The binary outputs of an answer, as views of `body`. Raises RefusedError."""
    outputs: dict[str, Array] = {}
    offset = json_size
    for tensor in described(status, body, json_size):
        size = tensor["parameters"]["binary_data_size"]
        flat = np.frombuffer(body[offset : offset + size], TRITON_DTYPES[tensor["datatype"]])
        outputs[tensor["name"]] = flat.reshape(tensor["shape"])
        offset += size
    return outputs
