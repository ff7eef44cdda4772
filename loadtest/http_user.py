"""A user over HTTP with binary tensors, on tritonclient's connection pool (geventhttpclient)."""

from __future__ import annotations

from collections.abc import Mapping

import tritonclient.http as triton

from loadtest.answers import Array
from loadtest.base_user import InferUser
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
        inputs = []
        for name, array in sample.inputs.items():
            tensor = triton.InferInput(name, list(array.shape), triton.np_to_triton_dtype(array.dtype))
            inputs.append(tensor.set_data_from_numpy(array, binary_data=True))
        outputs = [triton.InferRequestedOutput(name, binary_data=True) for name in sample.expected]
        result = self.client.infer(self.options.model, inputs, outputs=outputs)
        return {name: result.as_numpy(name) for name in sample.expected}
