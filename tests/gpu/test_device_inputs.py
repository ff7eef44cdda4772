"""Requests whose tensors lie on the GPU: read there, mixed with others, right in every bucket."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from client import CudaMemory, GrpcClient, HttpClient, SharedRegion
from ortgraph import Engine, RequestError, parse
from ortgraph.batch import Request
from ortgraph.providers.base import DeviceArray
from ortgraph.server import TritonServer

BUCKETS = "batch=1,2,4,8; h=2,5; w=4,9"
CONFIG = f"""
backend: "python"
max_batch_size: 8
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ -1, 3, -1 ] allow_ragged_batch: true }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ -1, 3, -1 ] }} ]
instance_group [ {{ count: 1 kind: KIND_GPU gpus: [ 0 ] }} ]
dynamic_batching {{ max_queue_delay_microseconds: 1000 }}
parameters {{ key: "buckets" value: {{ string_value: "{BUCKETS}" }} }}
parameters {{ key: "graph_capture" value: {{ string_value: "required" }} }}
parameters {{ key: "FORCE_CPU_ONLY_INPUT_TENSORS" value: {{ string_value: "no" }} }}
"""
SENDER = 'parameters { key: "response_mode" value: { string_value: "sender" } }\n'


def affine() -> onnx.ModelProto:
    """y = 2x + 1 for x [batch, h, 3, w]: two axes that can be padded, one between them that cannot."""
    dims: list[str | int] = ["batch", "h", 3, "w"]
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "two"], ["z"]), helper.make_node("Add", ["z", "one"], ["y"])],
        "affine",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, dims)],
        [numpy_helper.from_array(np.float32(value), name) for name, value in (("two", 2), ("one", 1))],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp("affine") / "model.onnx"
    onnx.save(affine(), path)
    written = {
        "max_batch_size": 8,
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1, 3, -1], "allow_ragged_batch": True}],
        "parameters": {
            "execution_provider": {"string_value": "cuda"},
            "buckets": {"string_value": BUCKETS},
            "graph_capture": {"string_value": "required"},
        },
    }
    made = Engine.load(parse(written, model_path=path))
    assert made.findings.notes == []
    yield made
    made.close()


def on_device(array: np.ndarray) -> DeviceArray:
    from cuda.bindings import runtime

    from ortgraph.providers import driver

    buffer = driver.DeviceBuffer(array.nbytes)
    (code,) = runtime.cudaMemcpy(buffer.address, array.ctypes.data, array.nbytes, driver.TO_DEVICE)
    assert int(code) == 0
    return DeviceArray(buffer.address, array.shape, array.dtype, buffer)


def image(rng: np.random.Generator, rows: int = 2, high: int = 5, wide: int = 9) -> np.ndarray:
    shape = (rng.integers(1, rows + 1), rng.integers(1, high + 1), 3, rng.integers(1, wide + 1))
    return rng.standard_normal(shape, np.float32)


def test_gpu_tensors_share_a_batch_with_others(engine: Engine) -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        arrays = [image(rng) for _ in range(int(rng.integers(1, 9)))]
        places = [rng.random() < 0.6 for _ in arrays]
        made = [
            Request({"x": on_device(array)}, has_device_arrays=True) if is_device else Request({"x": array})  # type: ignore[dict-item]
            for array, is_device in zip(arrays, places, strict=True)
        ]
        for array, answer in zip(arrays, engine.run_batch(made), strict=True):
            assert not isinstance(answer, RequestError), answer
            np.testing.assert_array_equal(answer["y"], 2 * array + 1)
    assert not [key for key in engine.metrics.values() if key[0] == "ortgraph_eager_runs_total"]


def test_an_exact_run_reads_gpu_tensors_too(engine: Engine) -> None:
    array = np.random.default_rng(1).standard_normal((1, 7, 3, 20), np.float32)
    (answer,) = engine.run_batch([Request({"x": on_device(array)}, has_device_arrays=True)])  # type: ignore[dict-item]
    assert not isinstance(answer, RequestError), answer
    np.testing.assert_array_equal(answer["y"], 2 * array + 1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    repository: Path = tmp_path_factory.mktemp("repository")
    for name, config in (("batch", CONFIG), ("sender", CONFIG + SENDER)):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(config)
        (repository / name / "1" / "model.py").write_text(
            "from ortgraph.backend import TritonPythonModel  # noqa: F401\n"
        )
        onnx.save(affine(), repository / name / "1" / "model.onnx")
    with TritonServer(repository) as running:
        assert {model.state for model in running.models()} == {"READY"}, running.models()
        yield running


@pytest.mark.parametrize("model", ["batch", "sender"])
@pytest.mark.parametrize("protocol", [HttpClient, GrpcClient])
def test_cuda_shared_memory_of_four_clients_beside_four_without(
    server: TritonServer, model: str, protocol: Any
) -> None:
    """server-3944, server-3992: tensors on the GPU are read where they are; as_numpy is never called on them."""
    url = server.http_url if protocol is HttpClient else server.grpc_url

    def ask(seed: int) -> None:
        rng = np.random.default_rng(seed)
        with protocol(url) as client:
            if seed % 2:
                for _ in range(40):
                    array = image(rng)
                    np.testing.assert_array_equal(client.infer(model, {"x": array})["y"], 2 * array + 1)
                return
            with SharedRegion(client, 1 << 16, memory=CudaMemory(1 << 16)) as region:
                for number in range(40):
                    array = image(rng)
                    room = {"y": array.nbytes} if number % 2 else None
                    np.testing.assert_array_equal(
                        region.infer(model, {"x": array}, output_bytes=room)["y"], 2 * array + 1
                    )

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, range(8)))
    with HttpClient(server.http_url) as client:
        assert client.triton.get_cuda_shared_memory_status() == []
    with urllib.request.urlopen(server.metrics_url, timeout=10) as page:
        assert not re.search(rf'ortgraph_eager_runs_total{{model="{model}"', page.read().decode())


def test_a_region_that_is_not_registered_is_refused_alone(server: TritonServer) -> None:
    """server-3429: the answer names the region; the next request is served."""
    import tritonclient.http as http

    with http.InferenceServerClient(server.http_url) as client:
        tensor = http.InferInput("x", [1, 2, 3, 4], "FP32")
        tensor.set_shared_memory("nowhere", 96, 0)
        with pytest.raises(http.InferenceServerException, match="nowhere"):
            client.infer("batch", [tensor])
    with HttpClient(server.http_url) as client:
        np.testing.assert_array_equal(client.infer("batch", {"x": np.ones((1, 2, 3, 4), np.float32)})["y"], 3.0)
