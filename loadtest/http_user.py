"""A user over HTTP with binary tensors, on tritonclient's connection pool (geventhttpclient)."""

from __future__ import annotations

from collections.abc import Mapping

import tritonclient.http as triton

from loadtest.answers import Array
from loadtest.base_user import InferUser, infer
from loadtest.samples import Sample


class InferHttpUser(InferUser):
    """One connection a user, kept open."""

    protocol = "HTTP"
    host = "127.0.0.1:8000"
    client: triton.InferenceServerClient | None = None

    def connect(self, address: str) -> None:
        timeout_s = self.options.timeout_s
        self.client = triton.InferenceServerClient(address, connection_timeout=timeout_s, network_timeout=timeout_s)

    def disconnect(self) -> None:
        if self.client is not None:
            self.client.close()

    def send(self, sample: Sample) -> Mapping[str, Array | None]:
        assert self.client is not None
        return infer(triton, self.client, self.options.model, sample)
