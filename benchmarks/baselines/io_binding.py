"""One IO binding a request, without captured graphs: inputs where they are, outputs on the device, one copy back."""

import json
import os
from typing import Any

import numpy as np
import onnxruntime as ort
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Serves `model.onnx` of its version folder."""

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        self.inputs = [tensor["name"] for tensor in config["input"]]
        self.outputs = [tensor["name"] for tensor in config["output"]]
        providers: list[Any] = ["CPUExecutionProvider"]
        self.device, self.device_id = "cpu", 0
        if args["model_instance_kind"] == "GPU":
            self.device, self.device_id = "cuda", int(args["model_instance_device_id"])
            providers.insert(0, ("CUDAExecutionProvider", {"device_id": self.device_id}))
        path = os.path.join(args["model_repository"], args["model_version"], "model.onnx")
        self.session = ort.InferenceSession(path, providers=providers)

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self.answer(request) for request in requests]

    def answer(self, request: Any) -> Any:
        binding = self.session.io_binding()
        arrays = []  # a binding keeps only their addresses
        for name in self.inputs:
            arrays.append(np.ascontiguousarray(pb_utils.get_input_tensor_by_name(request, name).as_numpy()))
            binding.bind_cpu_input(name, arrays[-1])
        for name in self.outputs:
            binding.bind_output(name, self.device, self.device_id)
        self.session.run_with_iobinding(binding)
        values = binding.copy_outputs_to_cpu()
        tensors = [pb_utils.Tensor(name, value) for name, value in zip(self.outputs, values, strict=True)]
        return pb_utils.InferenceResponse(tensors)
