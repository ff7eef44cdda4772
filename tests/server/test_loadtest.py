"""`python -m loadtest` against the real server, as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from loadtest import server_metrics
from loadtest.answers import WrongAnswerError, check_answer
from loadtest.percentiles import Latency
from ortgraph.server import ROOT, TritonServer

CONFIG = """
backend: "python"
max_batch_size: 8
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ -1 ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ -1 ] }} ]
instance_group [ {{ count: {instances} kind: KIND_CPU }} ]
"""
WRONG = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy() + 1)]) for r in requests]
"""
# Each instance answers only while the other one has a request too; it gives up after 5 s.
PAIR = """
import os, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        folder, instance = {folder!r}, args["model_instance_name"][-1]
        self.mine, self.other = (os.path.join(folder, str(n)) for n in (int(instance), 1 - int(instance)))
        self.count = 0
        open(self.mine, "w").write("0")

    def execute(self, requests):
        self.count += 1
        open(self.mine + ".new", "w").write(str(self.count))
        os.rename(self.mine + ".new", self.mine)
        end = time.monotonic() + 5
        while int(open(self.other).read()) < self.count:
            if time.monotonic() > end:
                error = pb_utils.TritonError("no second request came")
                return [pb_utils.InferenceResponse(output_tensors=[], error=error) for _ in requests]
            time.sleep(0.001)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`wrong` adds 1 to what model.onnx says; `pair` answers two requests at once or none."""
    folder = tmp_path_factory.mktemp("repository")
    meeting = tmp_path_factory.mktemp("meeting")
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "n"]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "identity", [tensors[0]], [tensors[1]])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    for name, source, instances in (("wrong", WRONG, 1), ("pair", PAIR.format(folder=str(meeting)), 2)):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(CONFIG.format(instances=instances))
        (folder / name / "1" / "model.py").write_text(source)
        onnx.save(model, folder / name / "1" / "model.onnx")
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Any:
    with TritonServer(repository) as running:
        assert {model.state for model in running.models()} == {"READY"}, running.models()
        yield running


def load(server: TritonServer, repository: Path, model: str, protocol: str, users: int) -> tuple[int, dict[str, Any]]:
    url = server.http_url if protocol == "http" else server.grpc_url
    command = [sys.executable, "-m", "loadtest", "--json", "--model", model, "--model-repository", str(repository)]
    command += ["--protocol", protocol, "--url", url, "--users", str(users), "--lengths", "4..8"]
    command += ["--duration-s", "2", "--warmup-s", "0.5", "--metrics-url", server.metrics_url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert done.stdout.startswith("{"), done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_wrong_answer_is_a_failure(server: TritonServer, repository: Path, protocol: str):
    code, result = load(server, repository, "wrong", protocol, users=1)
    assert code == 1
    assert result["latency"]["count"] == 0
    assert sum(result["failures"].values()) > 0
    assert all("off by" in failure for failure in result["failures"]), result["failures"]


def test_two_grpc_users_of_one_process_overlap(server: TritonServer, repository: Path):
    """locust 1016, grpc 23247: a call that blocks gevent would leave the second user waiting for ever."""
    _, result = load(server, repository, "pair", "grpc", users=2)
    assert result["latency"]["count"] > 10, result["failures"]
    assert sum(result["failures"].values()) <= 1, result["failures"]  # the last one, when the other user has stopped


def test_percentiles_are_those_of_the_samples():
    latency = Latency.of([float(i) for i in range(1, 1001)])
    assert latency.count == 1000
    assert latency.p50_ms == pytest.approx(np.percentile(np.arange(1, 1001), 50), abs=1)
    assert latency.p99_ms == pytest.approx(np.percentile(np.arange(1, 1001), 99), abs=1)


def test_metrics_grow_by_what_was_added():
    page = '# HELP a b\n# TYPE a counter\nortgraph_bucket_hits_total{{bucket="batch=1",model="m",version="1"}} {}\n'
    before, after = (server_metrics.parse(page.format(n)) for n in (3, 10))
    assert server_metrics.growth(before, after, server_metrics.BUCKET_HITS, "bucket", model="m") == {"batch=1": 7}


def test_an_answer_is_judged_by_type_shape_and_value():
    right = {"y": np.ones((1, 2), np.float32)}
    check_answer(right, {"y": right["y"] + np.float32(5e-4)})
    wrong = (right["y"] + 1, right["y"].astype(np.float64), np.ones((2, 1), np.float32), right["y"] * np.float32("nan"))
    for got in (*wrong, None):
        with pytest.raises(WrongAnswerError):
            check_answer(right, {"y": got})
