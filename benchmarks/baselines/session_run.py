"""What an engineer writes by hand: one `session.run` a request, with ONNX Runtime's default options."""

import json
import os
from typing import Any

import onnxruntime as ort
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Serves `model.onnx` of its version folder."""

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        self.inputs = [tensor["name"] for tensor in config["input"]]
        self.outputs = [tensor["name"] for tensor in config["output"]]
        providers: list[Any] = ["CPUExecutionProvider"]
        if args["model_instance_kind"] == "GPU":
            providers.insert(0, ("CUDAExecutionProvider", {"device_id": args["model_instance_device_id"]}))
        path = os.path.join(args["model_repository"], args["model_version"], "model.onnx")
        self.session = ort.InferenceSession(path, providers=providers)

    def execute(self, requests: list[Any]) -> list[Any]:
        responses = []
        for request in requests:
            feed = {name: pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in self.inputs}
            values = self.session.run(self.outputs, feed)
            tensors = [pb_utils.Tensor(name, value) for name, value in zip(self.outputs, values, strict=True)]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
