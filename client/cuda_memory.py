"""CUDA shared memory: the server reads inputs and writes outputs on the GPU, through a handle of the driver (CUDA IPC).

with GrpcClient("127.0.0.1:8001") as client, SharedRegion(client, 1 << 20, memory=CudaMemory(1 << 20)) as region:
    answer = region.infer("text_embedding", inputs, output_bytes={"embedding": 4 * 384})

A model served by ortgraph reads it on the GPU where its config.pbtxt says FORCE_CPU_ONLY_INPUT_TENSORS "no".
"""

from __future__ import annotations

import os
import uuid
from typing import Any

import numpy as np

from client.errors import SharedMemoryError
from client.sync import SyncClient
from client.tensors import Array


class CudaMemory:
    """Memory of one GPU that the server opens by handle. Needs tritonclient's CUDA packages (cuda-bindings)."""

    kind = "CUDA"
    hint = (
        "It must use the same GPU on this host. In containers both need --pid=host and --ipc=host, so that the two "
        "processes see each other; WSL 2 and Windows have no CUDA IPC."
    )

    def __init__(self, byte_size: int, device_id: int = 0) -> None:
        """Raises SharedMemoryError without a GPU, its packages, or that much memory."""
        try:
            import tritonclient.utils.cuda_shared_memory as region
            from cuda.bindings import runtime
        except (ImportError, RuntimeError) as error:
            raise SharedMemoryError(
                "CUDA shared memory needs the package cuda-bindings: pip install cuda-bindings"
            ) from error
        self._module, self._runtime = region, runtime
        self.name = f"client-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self.byte_size = byte_size
        self._device_id = device_id
        try:
            self._handle = region.create_shared_memory_region(self.name, byte_size, device_id)
        except Exception as error:  # tritonclient raises its own, cuda-bindings others
            raise SharedMemoryError(
                f"cannot make a region of {byte_size} bytes on GPU {device_id}: {error.__cause__ or error}"
            ) from None
        self._address = int(self._handle._base_addr)

    def register(self, client: SyncClient, deadline_s: float | None) -> None:
        handle = self._module.get_raw_handle(self._handle)
        client.call(
            lambda left_s: client.triton.register_cuda_shared_memory(
                self.name, handle, self._device_id, self.byte_size, **client.options(left_s)
            ),
            deadline_s,
            is_repeatable=False,
        )

    def unregister(self, client: SyncClient, deadline_s: float | None) -> None:
        client.call(
            lambda left_s: client.triton.unregister_cuda_shared_memory(self.name, **client.options(left_s)),
            deadline_s,
        )

    def write(self, offset_bytes: int, array: Array) -> None:
        """The copy is complete when this returns."""
        content = np.ascontiguousarray(array)
        if content.dtype == np.object_:  # serialised texts
            content = np.frombuffer(content.item(), np.uint8)
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._copy(self._address + offset_bytes, content.ctypes.data, content.nbytes, kind)

    def read(self, offset_bytes: int, dtype: Any, shape: tuple[int, ...]) -> Array:
        """Fixed-size elements; Triton writes texts to the CPU only."""
        found = np.empty(shape, dtype)
        if found.dtype == np.object_:
            raise SharedMemoryError("BYTES outputs cannot lie in CUDA shared memory; leave them out of output_bytes")
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._copy(found.ctypes.data, self._address + offset_bytes, found.nbytes, kind)
        return found

    def destroy(self) -> None:
        self._module.destroy_shared_memory_region(self._handle)

    def _copy(self, destination: int, source: int, byte_size: int, kind: Any) -> None:
        (code,) = self._runtime.cudaMemcpy(destination, source, byte_size, kind)
        if code != self._runtime.cudaError_t.cudaSuccess:
            raise SharedMemoryError(f"copying {byte_size} bytes of region '{self.name}' failed: {code.name}")
