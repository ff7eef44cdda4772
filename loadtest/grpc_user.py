"""A user over gRPC. gRPC's core blocks the thread, and with it every greenlet, unless it is told of gevent first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import grpc.experimental.gevent

# Before any channel is made: one made earlier would stop all other users while it waits.
grpc.experimental.gevent.init_gevent()

import numpy as np  # noqa: E402
from tritonclient.grpc import service_pb2  # noqa: E402
from tritonclient.utils import np_to_triton_dtype, triton_to_np_dtype  # noqa: E402

from loadtest.answers import Array  # noqa: E402
from loadtest.base_user import InferUser  # noqa: E402
from loadtest.samples import Sample  # noqa: E402

_METHOD = "/inference.GRPCInferenceService/ModelInfer"
_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # else all channels of the process share one connection
)


class InferGrpcUser(InferUser):
    """Unary calls only: streams hang under gevent. One connection a user; requests are encoded once."""

    protocol = "gRPC"
    host = "127.0.0.1:8001"
    channel: Any = None

    def prepare(self, model: str, pool: Sequence[Sample]) -> Sequence[bytes]:
        key = model, id(pool)
        if key not in _encoded:
            _encoded[key] = [_encode(model, sample) for sample in pool]
        return _encoded[key]

    def connect(self) -> None:
        self.channel = grpc.insecure_channel(self.address, options=_OPTIONS)
        self.call = self.channel.unary_unary(_METHOD)  # bytes in, bytes out

    def disconnect(self) -> None:
        if self.channel is not None:
            self.channel.close()

    def send(self, request: bytes) -> bytes:
        try:
            return self.call(request, timeout=self.timeout_s)  # type: ignore[no-any-return]
        except grpc.RpcError as error:
            raise ConnectionError(f"{error.code().name}: {error.details()}") from error

    def read(self, answer: bytes) -> Mapping[str, Array | None]:
        response = service_pb2.ModelInferResponse.FromString(answer)
        return {
            tensor.name: np.frombuffer(content, triton_to_np_dtype(tensor.datatype)).reshape(tensor.shape)
            for tensor, content in zip(response.outputs, response.raw_output_contents, strict=True)
        }


_encoded: dict[tuple[str, int], Sequence[bytes]] = {}


def _encode(model: str, sample: Sample) -> bytes:
    request = service_pb2.ModelInferRequest(model_name=model)
    for name, array in sample.inputs.items():
        request.inputs.add(name=name, datatype=np_to_triton_dtype(array.dtype), shape=array.shape)
        request.raw_input_contents.append(np.ascontiguousarray(array).tobytes())
    for name in sample.expected:
        request.outputs.add(name=name)
    encoded: bytes = request.SerializeToString()
    return encoded
