"""Sends every input back: `in_<dtype>` as `out_<dtype>`, unchanged."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([_echo(tensor) for tensor in request.inputs()]) for request in requests]


def _echo(tensor):
    name = tensor.name().replace("in_", "out_", 1)
    if name == "out_bytes":
        return pb_utils.Tensor(name, tensor.as_numpy())
    return pb_utils.Tensor.from_dlpack(name, tensor)  # BF16 has no numpy dtype
