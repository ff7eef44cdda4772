"""Tensors lent and borrowed by DLPack: right values, no copy, and nothing stays lent."""

from __future__ import annotations

import gc
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest

from ortgraph.dlpack import CPU, Lent, borrow_raw, lent_count
from ortgraph.dtypes import DType, from_ort, from_triton
from ortgraph.errors import UnsupportedRequest
from tests.toys import refused

NUMBERS = ["float", "double", "float16", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"]


def get(name: str) -> DType:
    dtype = from_ort(f"tensor({name})")
    assert dtype is not None
    return dtype


@pytest.fixture(autouse=True)
def nothing_stays_lent() -> Any:
    gc.collect()
    before = lent_count()
    yield
    gc.collect()
    assert lent_count() == before


@pytest.mark.parametrize("name", [*NUMBERS, "bool"])
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 3), (1,)])
def test_numpy_takes_what_is_lent_without_a_copy(name: str, shape: tuple[int, ...]) -> None:
    dtype = get(name)
    array = np.ones(shape, dtype.storage)
    before = lent_count()
    taken = np.from_dlpack(Lent(array, dtype))
    assert lent_count() == before + 1
    assert taken.dtype == array.dtype and taken.shape == shape
    np.testing.assert_array_equal(taken, array)
    assert array.size == 0 or np.shares_memory(taken, array)


@pytest.mark.parametrize("name", NUMBERS)
def test_onnxruntime_takes_what_is_lent(name: str) -> None:
    dtype = get(name)
    array = np.arange(6).astype(dtype.storage).reshape(2, 3)
    value = ort.OrtValue.from_dlpack(Lent(array, dtype))
    assert value.data_ptr() == array.ctypes.data
    assert value.element_type() == dtype.onnx_id
    np.testing.assert_array_equal(value.numpy(), array)


def test_bfloat16_goes_out_and_in_as_itself() -> None:
    words = np.array([[1.0, -2.5], [0.0, 3.0]], ml_dtypes.bfloat16).view(np.uint16)
    value = ort.OrtValue.from_dlpack(Lent(words, get("bfloat16")))
    assert value.element_type() == get("bfloat16").onnx_id
    assert value.data_ptr() == words.ctypes.data
    back = borrow_raw(value, "x", np.dtype(np.uint16))
    np.testing.assert_array_equal(back, words)
    assert back.ctypes.data == words.ctypes.data


def test_what_is_borrowed_is_read_only_and_keeps_its_owner() -> None:
    value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(np.arange(4, dtype=np.uint16), get("bfloat16").onnx_id)
    view = borrow_raw(value, "x", np.dtype(np.uint16))
    del value
    gc.collect()
    assert view.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_an_empty_tensor_can_be_borrowed() -> None:
    value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(np.empty((0, 3), np.uint16), get("bfloat16").onnx_id)
    assert borrow_raw(value, "x", np.dtype(np.uint16)).shape == (0, 3)


def test_another_element_size_is_refused() -> None:
    value = ort.OrtValue.ortvalue_from_numpy(np.ones(2, np.float32))
    with refused(UnsupportedRequest, "input 'x' cannot be read from device type 1"):
        borrow_raw(value, "x", np.dtype(np.uint16))


def test_the_array_lives_as_long_as_its_taker() -> None:
    dtype = get("int64")
    before = lent_count()
    lent = Lent(np.arange(1000), dtype)
    taken = np.from_dlpack(lent)
    del lent
    gc.collect()
    assert lent_count() == before + 1
    assert taken.tolist() == list(range(1000))
    del taken
    gc.collect()
    assert lent_count() == before


def test_one_array_can_be_lent_many_times() -> None:
    array = np.arange(3)
    lent = Lent(array, get("int64"))
    before = lent_count()
    takers = [np.from_dlpack(lent) for _ in range(5)]
    assert lent_count() == before + 5
    assert all(np.shares_memory(taker, array) for taker in takers)
    takers.clear()
    gc.collect()
    assert lent_count() == before


def test_the_device_is_the_cpu() -> None:
    assert Lent(np.zeros(1), get("double")).__dlpack_device__() == (CPU, 0)


def test_every_number_that_triton_has_can_be_lent() -> None:
    for name in "BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FP16 FP32 FP64 BF16".split():  # noqa: SIM905
        dtype = from_triton(f"TYPE_{name}")
        assert dtype is not None
        value = np.zeros((2, 2), dtype.storage)
        if name == "BF16":
            assert ort.OrtValue.from_dlpack(Lent(value, dtype)).shape() == [2, 2]
        else:
            assert np.from_dlpack(Lent(value, dtype)).dtype == dtype.storage
