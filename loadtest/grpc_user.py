"""A user over gRPC. gRPC's core blocks the thread, and with it every greenlet, unless it is told of gevent first."""

from __future__ import annotations

from collections.abc import Mapping

import grpc.experimental.gevent

# Before anything imports the stub: a channel made earlier would stop all other users while one waits.
grpc.experimental.gevent.init_gevent()

import tritonclient.grpc as triton  # noqa: E402

from loadtest.answers import Array  # noqa: E402
from loadtest.base_user import InferUser, infer  # noqa: E402
from loadtest.samples import Sample  # noqa: E402


class InferGrpcUser(InferUser):
    """Unary calls only: streams hang under gevent."""

    protocol = "gRPC"
    host = "127.0.0.1:8001"
    client: triton.InferenceServerClient | None = None

    def connect(self, address: str) -> None:
        self.client = triton.InferenceServerClient(address)

    def disconnect(self) -> None:
        if self.client is not None:
            self.client.close()

    def send(self, sample: Sample) -> Mapping[str, Array | None]:
        assert self.client is not None
        return infer(triton, self.client, self.options.model, sample, client_timeout=self.options.timeout_s)
