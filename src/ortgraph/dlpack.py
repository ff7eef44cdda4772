"""DLPack in and out, without a copy and without a third library.

In: what numpy cannot take from a capsule (bfloat16) is read from the DLManagedTensor itself. Out: any C-contiguous
host array is lent to whoever consumes the capsule, and kept alive until the consumer calls the deleter. The structs are
those of dlpack.h 0.8 (unversioned), which is what Triton's Python backend and ONNX Runtime exchange.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from .dtypes import DType
from .errors import UnsupportedRequest
from .providers.base import Array, DeviceArray
from .providers.host import memory_view
from .signature import Shape

CPU, CUDA, CPU_PINNED = 1, 2, 3
_INT, _UINT, _FLOAT, _BFLOAT, _BOOL = 0, 1, 2, 4, 6
_CODES = {"i": _INT, "u": _UINT, "f": _FLOAT, "b": _BOOL}


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _ManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_ManagedTensor._fields_ = (("tensor", _Tensor), ("manager_ctx", ctypes.c_void_p), ("deleter", _Deleter))

_NAME = b"dltensor"
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)

# What is lent, by the address of its struct, until the consumer calls the deleter.
_lent: dict[int, tuple[Any, ...]] = {}


def _forget(address: int) -> None:
    _lent.pop(address, None)


_release = _Deleter(_forget)


class Lent:
    """A host array as a DLPack exporter: hand it to `pb_utils.Tensor.from_dlpack(name, Lent(array, dtype))`.

    The array must be C-contiguous. It lives until the consumer is done with it, longer than this object if need be.
    """

    def __init__(self, array: Array, dtype: DType) -> None:
        """`dtype` tells bfloat16 words from uint16."""
        self._array = array
        self._code = _BFLOAT if dtype.onnx_name == "bfloat16" else _CODES[array.dtype.kind]

    def __dlpack_device__(self) -> tuple[int, int]:
        """Always the CPU."""
        return CPU, 0

    def __dlpack__(self, stream: Any = None) -> Any:
        """A fresh capsule named `dltensor`; a consumer that takes it must call its deleter."""
        array = self._array
        shape = (ctypes.c_int64 * max(array.ndim, 1))(*array.shape)
        managed = _ManagedTensor()
        tensor = managed.tensor
        tensor.data = array.__array_interface__["data"][0]
        tensor.device_type = CPU
        tensor.ndim = array.ndim
        tensor.dtype.code = self._code
        tensor.dtype.bits = array.dtype.itemsize * 8
        tensor.dtype.lanes = 1
        tensor.shape = shape
        managed.deleter = _release
        address = ctypes.addressof(managed)
        _lent[address] = (managed, shape, array)
        return _new_capsule(address, _NAME, None)


def lent_count() -> int:
    """How many arrays are lent out right now (a test that nothing leaks)."""
    return len(_lent)


def borrow_raw(exporter: Any, name: str, storage: np.dtype[Any]) -> Array:
    """A read-only view of raw words on an exporter's host tensor; the view keeps the exporter alive.

    Raises:
        UnsupportedRequest: the tensor lies on a device, or its element size is not that of `storage`.
    """
    tensor, shape, owner = _open(exporter, name, storage, (CPU, CPU_PINNED))
    view = memory_view((tensor.data or 0) + tensor.byte_offset, storage, shape, owner)
    view.flags.writeable = False
    return view


def borrow_device(exporter: Any, name: str, storage: np.dtype[Any]) -> DeviceArray:
    """An exporter's tensor in a GPU's memory, kept alive by what is returned.

    Raises:
        UnsupportedRequest: it lies elsewhere, or its element size is not that of `storage`.
    """
    tensor, shape, owner = _open(exporter, name, storage, (CUDA,))
    return DeviceArray((tensor.data or 0) + tensor.byte_offset, shape, storage, owner)


def _open(exporter: Any, name: str, storage: np.dtype[Any], devices: tuple[int, ...]) -> tuple[Any, Shape, Any]:
    """The DLTensor, its shape, and what keeps it alive. Triton's tensors are C-contiguous."""
    capsule = exporter.__dlpack__()
    tensor = ctypes.cast(_pointer_of(capsule, _NAME), ctypes.POINTER(_ManagedTensor)).contents.tensor
    if tensor.device_type not in devices or tensor.dtype.bits != storage.itemsize * 8:
        raise UnsupportedRequest(f"input '{name}' cannot be read from device type {tensor.device_type}")
    return tensor, tuple(tensor.shape[i] for i in range(tensor.ndim)), (capsule, exporter)
