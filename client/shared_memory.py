"""Tensors through shared memory: the server reads inputs and writes outputs in a region that both processes map.

The server must run on the same host and see the same /dev/shm. Worth it for large tensors only.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import tritonclient.utils.shared_memory as system
from tritonclient.utils import serialize_byte_tensor, triton_to_np_dtype

from client.errors import ClientError, InvalidInput, ServerRefused, SharedMemoryError, Unreachable
from client.sync import SyncClient
from client.tensors import Array, Tensor, decode, encode, infer_inputs, output_infos

ALIGNMENT_BYTES = 64
CLOSE_WAIT_S = 10.0
_POLL_S = 0.02
_IN_USE = "currently in use"


class RegionMemory(Protocol):
    """A kind of memory that the server can map: SystemMemory, or CudaMemory of cuda_memory.py.

    `kind` names it in messages, `hint` says what the server needs to open it.
    """

    kind: str
    hint: str
    name: str
    byte_size: int

    def register(self, client: SyncClient, deadline_s: float | None) -> None: ...
    def unregister(self, client: SyncClient, deadline_s: float | None) -> None: ...
    def write(self, offset_bytes: int, array: Array) -> None: ...
    def read(self, offset_bytes: int, dtype: Any, shape: tuple[int, ...]) -> Array: ...
    def destroy(self) -> None: ...


class SystemMemory:
    """A POSIX shared memory object; its pages are taken at once, so that a full /dev/shm is an error and no crash."""

    kind = "system"
    hint = (
        "It must run on this host, as a user who may open this one's files, and see the same /dev/shm: for containers "
        "--ipc=host, or one /dev/shm mounted in both."
    )

    def __init__(self, byte_size: int) -> None:
        self.name = f"client-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self.byte_size = byte_size
        try:
            self._handle = system.create_shared_memory_region(self.name, f"/{self.name}", byte_size, create_only=True)
        except system.SharedMemoryException as error:
            raise SharedMemoryError(f"cannot make a region of {byte_size} bytes: {error.__cause__ or error}") from None
        try:
            _take_pages(self.name, byte_size)
        except OSError as error:
            self.destroy()
            raise SharedMemoryError(
                f"cannot make a region of {byte_size} bytes: {error.strerror}; /dev/shm is too small or full "
                "(containers: raise --shm-size), or make a smaller region"
            ) from None

    def register(self, client: SyncClient, deadline_s: float | None) -> None:
        client.call(
            lambda left_s: client.triton.register_system_shared_memory(
                self.name, f"/{self.name}", self.byte_size, **client.options(left_s)
            ),
            deadline_s,
            is_repeatable=False,
        )

    def unregister(self, client: SyncClient, deadline_s: float | None) -> None:
        client.call(
            lambda left_s: client.triton.unregister_system_shared_memory(self.name, **client.options(left_s)),
            deadline_s,
        )

    def write(self, offset_bytes: int, array: Array) -> None:
        system.set_shared_memory_region(self._handle, [array], offset=offset_bytes)

    def read(self, offset_bytes: int, dtype: Any, shape: tuple[int, ...]) -> Array:
        view: Array = system.get_contents_as_numpy(self._handle, dtype, list(shape), offset=offset_bytes)
        return view.copy()

    def destroy(self) -> None:
        system.destroy_shared_memory_region(self._handle)


class SharedRegion:
    """A region of `byte_size` bytes, registered with the server; one request at a time.

    with GrpcClient("127.0.0.1:8001") as client, SharedRegion(client, byte_size=1 << 20) as region:
        answer = region.infer("text_embedding", inputs, output_bytes={"embedding": 4 * 384})

    Leaving the `with`, an error, garbage collection and the end of the program all unregister and unlink it. Answers
    are copies, so they stay valid. Raises SharedMemoryError when the server cannot open the region.
    """

    def __init__(self, client: SyncClient, byte_size: int, *, memory: RegionMemory | None = None) -> None:
        if byte_size < 1:
            raise InvalidInput(f"byte_size must be 1 or more, got {byte_size}")
        self._client = client
        self._memory: RegionMemory = memory or SystemMemory(byte_size)
        self._lock = threading.Lock()
        self._is_in_doubt = False
        try:
            self._register(None)
        except BaseException:
            self._memory.destroy()
            raise
        self._finalizer = weakref.finalize(self, _give_back_quietly, self._memory, client)

    @property
    def name(self) -> str:
        """The region's name in the server's status."""
        return self._memory.name

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Array],
        *,
        output_bytes: Mapping[str, int] | None = None,
        deadline_s: float | None = None,
        request_id: str = "",
        model_version: str = "",
    ) -> dict[str, Array]:
        """Run `model` with the inputs and the outputs of `output_bytes` in the region.

        `output_bytes` gives each wanted output's room in bytes; None sends all outputs over the connection instead.
        """
        module = self._client.module
        with self._lock:
            if not self._finalizer.alive:
                raise SharedMemoryError(f"region '{self.name}' was closed; make a new one")
            if self._is_in_doubt:
                self._take_back(deadline_s)
            prepared, end_bytes = self._write(encode(inputs))
            requested, offsets = [], {}
            for name, room_bytes in (output_bytes or {}).items():
                offsets[name] = _aligned(end_bytes)
                end_bytes = offsets[name] + room_bytes
                output = module.InferRequestedOutput(name)
                output.set_shared_memory(self.name, room_bytes, offsets[name])
                requested.append(output)
            self._check_room(end_bytes)
            self._is_in_doubt = True  # until the call ends in a way that says the server is done with the region
            try:
                result = self._client.infer_prepared(
                    model,
                    prepared,
                    outputs=requested or None,
                    deadline_s=deadline_s,
                    request_id=request_id,
                    model_version=model_version,
                )
            except (ServerRefused, Unreachable):
                self._is_in_doubt = False
                raise
            self._is_in_doubt = False
            return self._read(result, offsets)

    def close(self) -> None:
        """Unlink and unregister the region. Safe to call twice.

        A request that ran past its deadline may still use it: waits up to 10 s for the server to let go, then raises
        SharedMemoryError. The memory is freed in any case once the server lets go.
        """
        if self._finalizer.detach() is not None:
            _give_back(self._memory, self._client)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except ClientError as failure:
            if error is None:
                raise
            error.add_note(str(failure))

    def _write(self, tensors: list[Tensor]) -> tuple[list[Any], int]:
        """Copy the inputs into the region; their InferInputs and the end of what is used, bytes."""
        module = self._client.module
        prepared, contents, end_bytes = [], [], 0
        for tensor in tensors:
            if tensor.array.size == 0:  # nothing to share
                prepared += infer_inputs(module, [tensor])
                continue
            is_text = tensor.datatype == "BYTES"
            content = serialize_byte_tensor(tensor.array) if is_text else np.atleast_1d(tensor.array)
            size_bytes = len(content.item()) if is_text else content.nbytes
            offset = _aligned(end_bytes)
            end_bytes = offset + size_bytes
            infer_input = module.InferInput(tensor.name, list(tensor.array.shape), tensor.datatype)
            prepared.append(infer_input.set_shared_memory(self.name, size_bytes, offset))
            contents.append((offset, content))
        self._check_room(end_bytes)
        for offset, content in contents:
            self._memory.write(offset, content)
        return prepared, end_bytes

    def _check_room(self, needed_bytes: int) -> None:
        if needed_bytes > self._memory.byte_size:
            raise SharedMemoryError(
                f"the request needs {needed_bytes} bytes, the region has {self._memory.byte_size}; make a larger one"
            )

    def _read(self, result: Any, offsets: Mapping[str, int]) -> dict[str, Array]:
        if not offsets:
            return decode(result)
        answers = {}
        for info in output_infos(result):
            dtype = triton_to_np_dtype(info.datatype)
            is_empty = 0 in info.shape
            answers[info.name] = (
                np.empty(info.shape, dtype) if is_empty else self._memory.read(offsets[info.name], dtype, info.shape)
            )
        return answers

    def _register(self, deadline_s: float | None) -> None:
        try:
            self._memory.register(self._client, deadline_s)
        except ServerRefused as error:
            raise SharedMemoryError(
                f"{self._client.url}: the server cannot open the {self._memory.kind} shared memory region: "
                f"{error.message} {self._memory.hint}"
            ) from None

    def _take_back(self, deadline_s: float | None) -> None:
        """After a request that may still run: wait until the server lets go, and register again."""
        _unregister(self._memory, self._client, CLOSE_WAIT_S if deadline_s is None else deadline_s)
        self._register(deadline_s)
        self._is_in_doubt = False


def _unregister(memory: RegionMemory, client: SyncClient, wait_s: float) -> None:
    end_s = time.monotonic() + wait_s
    while True:
        try:
            return memory.unregister(client, wait_s)
        except ServerRefused as error:
            if _IN_USE not in error.message or time.monotonic() >= end_s:
                raise SharedMemoryError(f"{client.url}: region '{memory.name}' stays registered: {error}") from None
        time.sleep(_POLL_S)


def _give_back(memory: RegionMemory, client: SyncClient) -> None:
    memory.destroy()  # first: whatever the server says, the name is gone; what it has mapped stays valid for it
    _unregister(memory, client, CLOSE_WAIT_S)


def _give_back_quietly(memory: RegionMemory, client: SyncClient) -> None:
    """For the collector and the end of the program, where nobody can hear an error."""
    with contextlib.suppress(ClientError):
        _give_back(memory, client)


def _take_pages(name: str, byte_size: int) -> None:
    if sys.platform != "linux":
        return
    file = os.open(f"/dev/shm/{name}", os.O_RDWR)
    try:
        os.posix_fallocate(file, 0, byte_size)
    finally:
        os.close(file)


def _aligned(offset_bytes: int) -> int:
    return -(-offset_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
