"""numpy arrays to Triton's tensors: every dtype, and a clear refusal of everything else."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from client import InvalidInput
from client.tensors import encode, infer_inputs, requested_outputs

DTYPES: list[tuple[Any, str]] = [
    (np.bool_, "BOOL"),
    (np.uint8, "UINT8"),
    (np.uint16, "UINT16"),
    (np.uint32, "UINT32"),
    (np.uint64, "UINT64"),
    (np.int8, "INT8"),
    (np.int16, "INT16"),
    (np.int32, "INT32"),
    (np.int64, "INT64"),
    (np.float16, "FP16"),
    (ml_dtypes.bfloat16, "BF16"),
    (np.float32, "FP32"),
    (np.float64, "FP64"),
]


@pytest.mark.parametrize(("dtype", "name"), DTYPES)
def test_each_dtype_has_its_triton_name(dtype: Any, name: str) -> None:
    (tensor,) = encode({"x": np.zeros((2, 3), dtype)})
    assert tensor.datatype == name
    for module in (tritonclient.http, tritonclient.grpc):
        (sent,) = infer_inputs(module, [tensor])
        assert (sent.name(), sent.datatype(), sent.shape()) == ("x", name, [2, 3])


def test_text_is_sent_as_utf8_and_bytes_as_they_are() -> None:
    arrays = {
        "objects": np.array([["é", b"\xff\x00"]], dtype=object),
        "unicode": np.array(["é", "abc"]),
        "bytes": np.array([b"abc"]),
    }
    objects, unicode, raw = encode(arrays)
    assert objects.array.tolist() == [["é".encode(), b"\xff\x00"]]
    assert unicode.array.tolist() == ["é".encode(), b"abc"]
    assert [tensor.datatype for tensor in (objects, unicode, raw)] == ["BYTES"] * 3


def test_other_byte_orders_and_strides_are_converted() -> None:
    (tensor,) = encode({"x": np.arange(6, dtype=">i4").reshape(2, 3).T})
    assert tensor.datatype == "INT32"
    (sent,) = infer_inputs(tritonclient.http, [tensor])
    assert np.frombuffer(sent._get_binary_data(), np.int32).tolist() == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1, 2], "must be a numpy array, got list"),
        (np.zeros(2, np.complex64), "dtype complex64, which Triton does not have"),
        (np.zeros(2, "datetime64[s]"), "which Triton does not have"),
        (np.zeros(2, ml_dtypes.float8_e4m3fn), "dtype float8_e4m3fn, which Triton does not have"),
        (np.array([b"a", 3], dtype=object), "must hold str or bytes, got int at 1"),
        (np.array([None], dtype=object), "must hold str or bytes, got NoneType at 0"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(value: Any, text: str) -> None:
    with pytest.raises(InvalidInput, match="input 'prompt'") as caught:
        encode({"prompt": value})
    assert text in str(caught.value)


@pytest.mark.parametrize("names", ["embedding", []])
def test_outputs_are_a_list_of_names(names: Any) -> None:
    with pytest.raises(InvalidInput, match="outputs must be a list"):
        requested_outputs(tritonclient.http, names)
    assert requested_outputs(tritonclient.http, None) is None
