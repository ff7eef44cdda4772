"""Captured buckets on the real server, without an NVIDIA GPU: retirement and recapture while four clients ask."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import tritonclient.http as http

from ortgraph.server import TritonServer
from tests import toys, vulkan
from tests.webgpu import gpu_toys

CLIENTS, REQUESTS = 4, 25
MODEL_PY = "from ortgraph.backend import TritonPythonModel as TritonPythonModel\n"
MODELS = {
    "encoder": (
        gpu_toys.encoder(),
        f"""
backend: "python"
max_batch_size: 4
input [
  {{ name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true }},
  {{ name: "attention_mask" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true }}
]
dynamic_batching {{ max_queue_delay_microseconds: 2000 }}
instance_group [ {{ kind: KIND_CPU }} ]
optimization {{ execution_accelerators {{ gpu_execution_accelerator : [ {{ name : "webgpu" }} ] }} }}
parameters [
  {{ key: "buckets" value: {{ string_value: "batch=1,2,4; sequence=4,8" }} }},
  {{ key: "value_ranges" value: {{ string_value: "{gpu_toys.ENCODER_RANGES}" }} }},
  {{ key: "graph_capture" value: {{ string_value: "required" }} }},
  {{ key: "response_mode" value: {{ string_value: "sender" }} }}
]
""",
    ),
    "convolution": (
        gpu_toys.convolution(),
        """
backend: "python"
max_batch_size: 2
dynamic_batching { max_queue_delay_microseconds: 2000 }
instance_group [ { kind: KIND_CPU } ]
parameters [
  { key: "execution_provider" value: { string_value: "webgpu" } },
  { key: "captures_on_demand" value: { string_value: "2" } },
  { key: "buffer_pool_generations" value: { string_value: "1" } },
  { key: "debug" value: { string_value: "1" } }
]
""",
    ),
    "branching": (
        gpu_toys.branching(),
        """
backend: "python"
instance_group [ { kind: KIND_CPU } ]
parameters [ { key: "execution_provider" value: { string_value: "webgpu" } } ]
""",
    ),
    "required": (
        gpu_toys.branching(),
        """
backend: "python"
instance_group [ { kind: KIND_CPU } ]
parameters [
  { key: "execution_provider" value: { string_value: "webgpu" } },
  { key: "graph_capture" value: { string_value: "required" } }
]
""",
    ),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    if reason := vulkan.why_not():
        pytest.skip(reason)
    repository = tmp_path_factory.mktemp("webgpu") / "models"
    for name, (model, config) in MODELS.items():
        folder: Path = repository / name / "1"
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(MODEL_PY)
        (folder.parent / "config.pbtxt").write_text(config)
        onnx.save(model, folder / "model.onnx")
    with TritonServer(repository, log_path=repository.parent / "triton.log", env=vulkan.environment()) as running:
        yield running


def states(server: TritonServer) -> dict[str, tuple[str, str]]:
    return {model.name: (model.state, model.reason) for model in server.models()}


def metric(server: TritonServer, name: str, model: str) -> float:
    """The sum of a series over its other labels, when what was counted so far is passed on (once a second)."""
    time.sleep(1.5)
    with urllib.request.urlopen(server.metrics_url, timeout=10) as page:
        lines = page.read().decode().splitlines()
    found = [line for line in lines if re.match(rf'{name}{{[^}}]*model="{model}"', line)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def ask(client: http.InferenceServerClient, model: str, inputs: dict[str, np.ndarray[Any, Any]], output: str) -> Any:
    tensors = []
    for name, array in inputs.items():
        tensor = http.InferInput(name, list(array.shape), "INT64" if array.dtype == np.int64 else "FP32")
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    return client.infer(model, tensors).as_numpy(output)


def ask_many(server: TritonServer, model: str, output: str, made: Any, session: ort.InferenceSession) -> None:
    """Each client's answers against plain onnxruntime's."""

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        with http.InferenceServerClient(server.http_url, network_timeout=120.0) as client:
            for _ in range(REQUESTS):
                inputs = made(rng)
                got, wanted = ask(client, model, inputs, output), toys.alone(session, inputs)[output]
                np.testing.assert_allclose(got, wanted, atol=1e-4)

    with ThreadPoolExecutor(CLIENTS) as clients:
        for done in [clients.submit(work, seed) for seed in range(CLIENTS)]:
            done.result()


def test_a_model_that_cannot_be_captured_serves_eager_or_is_refused(server: TritonServer) -> None:
    found = states(server)
    assert found["branching"] == ("READY", "")
    state, reason = found["required"]
    assert state == "UNAVAILABLE"
    assert "control flow nodes" in reason
    assert "Traceback" not in reason
    with http.InferenceServerClient(server.http_url) as client:
        x = np.array([1, 2, 3], np.float32)
        np.testing.assert_array_equal(ask(client, "branching", {"x": x}, "y"), -x)


def test_ragged_requests_run_in_captured_buckets(server: TritonServer) -> None:
    session = toys.plain(gpu_toys.encoder())
    ask_many(server, "encoder", "embedding", lambda rng: gpu_toys.text(rng, int(rng.integers(1, 9))), session)
    assert metric(server, "ortgraph_live_buckets", "encoder") == 6
    assert metric(server, "ortgraph_captures_total", "encoder") == 6
    assert metric(server, "ortgraph_eager_runs_total", "encoder") == 0


def test_shapes_come_and_go_while_four_clients_ask(server: TritonServer) -> None:
    """Five widths, one or two rows, two places: buckets retire and are captured again under load, with a small pool."""
    session = toys.plain(gpu_toys.convolution())
    ask_many(server, "convolution", "y", lambda rng: gpu_toys.image(rng, int(rng.integers(3, 8))), session)
    assert metric(server, "ortgraph_eager_runs_total", "convolution") == 0
