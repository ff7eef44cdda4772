"""The table of element types."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest

from ortgraph.dtypes import _TABLE, DType, as_storage, from_ort, from_triton, to_float64
from ortgraph.errors import InvalidRequest
from tests.toys import refused

# Every type that Triton's config knows and that carries data.
TRITON_TYPES = (
    "BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FP16 FP32 FP64 STRING BF16".split()  # noqa: SIM905
)


def get(name: str) -> DType:
    dtype = from_ort(f"tensor({name})")
    assert dtype is not None
    return dtype


def test_numbers_are_onnx_own() -> None:
    for dtype in _TABLE:
        assert onnx.TensorProto.DataType.Name(dtype.onnx_id) == dtype.onnx_name.upper()


def test_storage_has_the_size_of_an_element() -> None:
    for dtype in _TABLE:
        if not dtype.is_string:
            assert dtype.storage.itemsize == onnx.helper.tensor_dtype_to_np_dtype(dtype.onnx_id).itemsize
        if not dtype.is_raw and not dtype.is_string:
            assert dtype.storage == onnx.helper.tensor_dtype_to_np_dtype(dtype.onnx_id)


def test_every_triton_type_is_known() -> None:
    for name in TRITON_TYPES:
        dtype = from_triton(f"TYPE_{name}")
        assert dtype is not None and dtype.triton == f"TYPE_{name}" and dtype.short == name
    assert from_triton("TYPE_BYTES") == get("string")
    assert from_triton("TYPE_INVALID") is None
    assert from_triton("FP32") is None


def test_what_is_no_tensor_has_no_type() -> None:
    assert from_ort("seq(tensor(float))") is None
    assert from_ort("map(int64,tensor(float))") is None
    assert from_ort("tensor(int4)") is None
    assert from_ort("tensor(double)") == get("double")


def test_short_name_without_a_triton_type_is_onnx_own() -> None:
    assert get("float8e5m2").triton is None
    assert get("float8e5m2").short == "float8e5m2"


def test_bfloat16_words_become_their_numbers() -> None:
    values = np.array([0.0, 1.0, -2.5, 3.140625, np.inf], ml_dtypes.bfloat16)
    words = as_storage("x", values, get("bfloat16"))
    assert words.dtype == np.uint16
    np.testing.assert_array_equal(to_float64(words, get("bfloat16")), [0.0, 1.0, -2.5, 3.140625, np.inf])
    np.testing.assert_array_equal(to_float64(np.array([1.5], np.float32), get("float")), [1.5])


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"])
def test_fp8_is_taken_as_its_words_and_only_as_its_own_type(name: str) -> None:
    values = np.array([0.5, -1.0], getattr(ml_dtypes, name))
    dtype = get(name.replace("_", ""))
    np.testing.assert_array_equal(as_storage("x", values, dtype), values.view(np.uint8))
    with refused(InvalidRequest, f"input 'x' expects BF16, got {name}"):
        as_storage("x", values, get("bfloat16"))


def test_nothing_is_cast_silently() -> None:
    with refused(InvalidRequest, "input 'x' expects FP32, got float64"):
        as_storage("x", [1.0], get("float"))
    with refused(InvalidRequest, "input 'x' expects INT32, got int64"):
        as_storage("x", np.array([1]), get("int32"))
    with refused(InvalidRequest, "input 'x' expects STRING, got int64"):
        as_storage("x", np.array([1]), get("string"))
    with refused(InvalidRequest, "input 'x' expects FP32, got >f4"):
        as_storage("x", np.array([1], ">f4"), get("float"))


@pytest.mark.parametrize("values", [["a", "bc"], [b"a", b"bc"]])
def test_strings_become_objects(values: list[str] | list[bytes]) -> None:
    array = as_storage("x", values, get("string"))
    assert array.dtype == np.object_
    assert array.tolist() == values


def test_strided_and_unaligned_arrays_are_copied_others_are_not() -> None:
    whole = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert as_storage("x", whole, get("float")) is whole
    strided = as_storage("x", whole[:, ::2], get("float"))
    assert strided.flags.c_contiguous
    np.testing.assert_array_equal(strided, [[0, 2], [4, 6], [8, 10]])
    unaligned = np.frombuffer(b"\0" + whole.tobytes(), np.float32, 12, offset=1)
    assert not unaligned.flags.aligned
    aligned = as_storage("x", unaligned, get("float"))
    assert aligned.flags.aligned
    np.testing.assert_array_equal(aligned, whole.ravel())


def test_a_scalar_stays_one() -> None:
    assert as_storage("x", np.float32(3), get("float")).shape == ()
