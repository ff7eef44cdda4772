"""Captured graphs behind the real server: many clients, different lengths, both response modes."""

from __future__ import annotations

import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import psutil
import pytest
import tritonclient.grpc as grpc

from models.encoder import TINY, build
from ortgraph.server import TritonServer

CONFIG = """
backend: "python"
max_batch_size: 8
input [
  { name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true },
  { name: "attention_mask" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true }
]
output [ { name: "embedding" data_type: TYPE_FP32 dims: [ 32 ] } ]
instance_group [ { count: 1 kind: KIND_GPU gpus: [ 0 ] } ]
dynamic_batching { }
parameters { key: "buckets" value: { string_value: "batch=1,2,4,8; sequence=8,16,32" } }
parameters { key: "value_ranges" value: { string_value: "input_ids=0..99; attention_mask=0..1" } }
parameters { key: "graph_capture" value: { string_value: "required" } }
"""
SHARED = CONFIG.replace("count: 1", "count: 3")  # one engine process
SENDER = 'parameters { key: "response_mode" value: { string_value: "sender" } }\n'


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    for name, config in (("batch", CONFIG), ("sender", CONFIG + SENDER), ("shared", SHARED)):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config)
        (folder / name / "1" / "model.py").write_text("from ortgraph.backend import TritonPythonModel  # noqa: F401\n")
        onnx.save(build(replace(TINY, dtype="fp32"), seed=3), folder / name / "1" / "model.onnx")
    return folder


@pytest.fixture(scope="module")
def server(repository: Path):
    with TritonServer(repository) as running:
        assert {model.state for model in running.models()} == {"READY"}, running.models()
        yield running


def ask(client: grpc.InferenceServerClient, model: str, ids: np.ndarray) -> np.ndarray:
    inputs = []
    for name, array in (("input_ids", ids), ("attention_mask", np.ones_like(ids))):
        tensor = grpc.InferInput(name, list(array.shape), "INT64")
        inputs.append(tensor.set_data_from_numpy(array))
    return client.infer(model, inputs).as_numpy("embedding")


@pytest.mark.parametrize("model", ["batch", "sender", "shared"])
def test_concurrent_requests_of_all_lengths_are_right_and_replayed(server: TritonServer, repository: Path, model: str):
    session = ort.InferenceSession(str(repository / model / "1" / "model.onnx"), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    made = [rng.integers(0, 100, (int(rng.integers(1, 3)), int(rng.integers(1, 33)))) for _ in range(400)]
    with grpc.InferenceServerClient(server.grpc_url) as client, ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda ids: ask(client, model, ids), made))
    for ids, answer in zip(made, answers, strict=True):
        wanted = session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})[0]
        np.testing.assert_allclose(answer, wanted, atol=5e-3)
    hits = re.compile(rf'ortgraph_bucket_hits_total{{bucket="batch=\d,sequence=\d+",model="{model}"')
    page = ""
    while not hits.search(page):  # counts are passed on once a second; the test's time-out ends a wait in vain
        page = urllib.request.urlopen(server.metrics_url, timeout=10).read().decode()
    assert not re.search(rf'ortgraph_eager_runs_total{{model="{model}"', page)


@pytest.mark.parametrize("model", ["batch", "sender", "shared"])
def test_a_bad_request_fails_alone(server: TritonServer, model: str):
    with grpc.InferenceServerClient(server.grpc_url) as client, ThreadPoolExecutor(8) as threads:
        good = [threads.submit(ask, client, model, np.full((1, 5), 7)) for _ in range(20)]
        bad = [threads.submit(ask, client, model, np.full((1, 5), 100)) for _ in range(20)]
        for future in bad:
            with pytest.raises(grpc.InferenceServerException, match=r"outside 0\.\.99"):
                future.result()
        first = good[0].result()
        for future in good:
            np.testing.assert_allclose(future.result(), first, atol=5e-3)


def test_three_instances_share_one_engine_and_outlive_it(server: TritonServer):
    """Its death costs what was in flight; a new one captures anew and serves on."""
    ids = np.random.default_rng(5).integers(0, 100, (1, 9))
    with grpc.InferenceServerClient(server.grpc_url) as client, ThreadPoolExecutor(4) as threads:
        wanted = ask(client, "shared", ids)
        (engine,) = (p for p in psutil.Process(server.pid).children(True) if "engine_process" in " ".join(p.cmdline()))
        engine.kill()
        lost = 0
        for future in [threads.submit(ask, client, "shared", ids) for _ in range(12)]:
            try:
                np.testing.assert_allclose(future.result(), wanted, atol=5e-3)
            except grpc.InferenceServerException as error:
                assert "the engine process ended" in str(error)
                lost += 1
        assert lost <= 3
        np.testing.assert_allclose(ask(client, "shared", ids), wanted, atol=5e-3)
