"""Users whose tensors go through memory that the server maps too: the host's, or a GPU's. Requests go over HTTP.

Each request copies its inputs into the user's region and its outputs out of it, as a real client must.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tritonclient.http as triton

from client import CudaMemory, HttpClient
from client.shared_memory import ALIGNMENT_BYTES, RegionMemory, SystemMemory
from client.sync import SyncClient
from loadtest.answers import Array
from loadtest.http_user import InferHttpUser
from loadtest.samples import Sample
from loadtest.wire import TRITON_DTYPES, described, frame


@dataclass(frozen=True)
class Prepared:
    """A request's bytes, and where its arrays lie in the region."""

    frame: bytes
    inputs: Sequence[tuple[int, Array]]


class InferSharedMemoryUser(InferHttpUser):
    """A region a user, registered once; a subclass says of which memory it is."""

    abstract = True
    memory: RegionMemory | None = None
    client: SyncClient | None = None

    @abc.abstractmethod
    def allocate(self, byte_size: int) -> RegionMemory:
        """A region of so many bytes."""

    def prepare(self, model: str, pool: Sequence[Sample]) -> Sequence[Any]:
        """The layout is the same for all requests: every tensor has the room of the largest of its name."""
        self.offsets: dict[str, int] = {}
        end_bytes = 0
        for kind in ("inputs", "expected"):
            for name in getattr(pool[0], kind):
                self.offsets[name] = end_bytes
                largest = max(getattr(sample, kind)[name].nbytes for sample in pool)
                end_bytes += math.ceil(largest / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.memory = self.allocate(end_bytes)
        return [self._prepared(model, sample) for sample in pool]

    def _prepared(self, model: str, sample: Sample) -> Prepared:
        assert self.memory is not None
        tensors, wanted = [], []
        for name, array in sample.inputs.items():
            tensor = triton.InferInput(name, list(array.shape), triton.np_to_triton_dtype(array.dtype))
            tensors.append(tensor.set_shared_memory(self.memory.name, array.nbytes, self.offsets[name]))
        for name, array in sample.expected.items():
            output = triton.InferRequestedOutput(name, binary_data=True)
            output.set_shared_memory(self.memory.name, array.nbytes, self.offsets[name])
            wanted.append(output)
        return Prepared(frame(model, tensors, wanted), [(self.offsets[n], a) for n, a in sample.inputs.items()])

    def connect(self) -> None:
        assert self.memory is not None
        self.client = HttpClient(self.address, deadline_s=self.timeout_s)
        self.memory.register(self.client, None)

    def on_stop(self) -> None:
        super().on_stop()
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.destroy()
            if self.client is not None:
                memory.unregister(self.client, None)
        if self.client is not None:
            self.client.close()

    def send(self, request: Prepared) -> Any:  # type: ignore[override]
        assert self.memory is not None
        for offset, array in request.inputs:
            self.memory.write(offset, array)
        answer = super().send(request.frame)
        return {
            tensor["name"]: self.memory.read(
                self.offsets[tensor["name"]], TRITON_DTYPES[tensor["datatype"]], tuple(tensor["shape"])
            )
            for tensor in described(*answer)
        }

    def read(self, answer: Any) -> Mapping[str, Array | None]:
        return answer  # type: ignore[no-any-return]


class InferSystemSharedMemoryUser(InferSharedMemoryUser):
    """The host's memory: the server must run on this host and see the same /dev/shm."""

    protocol = "system shared memory"

    def allocate(self, byte_size: int) -> RegionMemory:
        return SystemMemory(byte_size)


class InferCudaSharedMemoryUser(InferSharedMemoryUser):
    """Memory of GPU 0: the server must run on this host with the same GPU, in a container with `--pid=host`."""

    protocol = "CUDA shared memory"

    def allocate(self, byte_size: int) -> RegionMemory:
        return CudaMemory(byte_size)
