"""Answers zeros of the right size without running anything: the ceiling of server and load client."""

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Every dynamic size of an output is taken from the last axis of the first input."""

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        self.first_input = config["input"][0]["name"]
        self.is_batched = config.get("max_batch_size", 0) > 0
        self.outputs = [
            (
                tensor["name"],
                [int(size) for size in tensor["dims"]],
                pb_utils.triton_string_to_numpy(tensor["data_type"]),
            )
            for tensor in config["output"]
        ]

    def execute(self, requests: list[Any]) -> list[Any]:
        responses = []
        for request in requests:
            shape = pb_utils.get_input_tensor_by_name(request, self.first_input).shape()
            tensors = []
            for name, dims, dtype in self.outputs:
                sizes = [shape[-1] if size < 0 else size for size in dims]
                tensors.append(pb_utils.Tensor(name, np.zeros([shape[0], *sizes] if self.is_batched else sizes, dtype)))
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
