"""Sleeps `delay_ms`, or until the request is cancelled, and remembers what became of each request.

Answers `outcomes`: BYTES [requests so far], "<request id> done|cancelled". A request with delay 0 only asks.
"""

import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self._outcomes = []

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        delays_ms = pb_utils.get_input_tensor_by_name(request, "delay_ms").as_numpy()
        delay_ms = int(delays_ms.ravel()[0])
        if delay_ms:
            self._outcomes.append(f"{request.request_id()} {_sleep(request, delay_ms)}")
        outcomes = np.array([text.encode() for text in self._outcomes], dtype=np.object_)
        if delays_ms.ndim == 2:  # the model has a batch dimension
            outcomes = np.tile(outcomes, (len(delays_ms), 1))
        return pb_utils.InferenceResponse([pb_utils.Tensor("outcomes", outcomes)])


def _sleep(request, delay_ms):
    end = time.monotonic() + delay_ms / 1000
    while time.monotonic() < end:
        if request.is_cancelled():
            return "cancelled"
        time.sleep(0.005)
    return "done"
