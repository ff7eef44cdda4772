"""`python -m loadtest` against the real server, as a user runs it."""

from __future__ import annotations

import json
import re
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


# Answers about {sleep_s} seconds after a request came, every twentieth {long_s}; writes what it took. Many at once, and
# no two alike, so that the users do not march in step.
SLEEPY = """
import threading, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.count, self.lock, self.file = 0, threading.Lock(), open({record!r}, "a", buffering=1)

    def execute(self, requests):
        start = time.perf_counter()
        for request in requests:
            self.count += 1
            wait = {long_s} if self.count % 20 == 0 else {sleep_s} * (0.9 + 0.2 * (self.count * 0.618 % 1))
            value = request.inputs()[0].as_numpy().copy()
            threading.Thread(target=self.answer, args=(start, wait, value, request.get_response_sender())).start()

    def answer(self, start, wait, value, sender):
        time.sleep(wait - (time.perf_counter() - start))
        with self.lock:
            self.file.write(f"{{(time.perf_counter() - start) * 1e3}}\\n")
        tensor = pb_utils.Tensor("y", value)
        sender.send(pb_utils.InferenceResponse([tensor]), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
# Takes 5 ms a request, one after the other, and once, at the {at}th request, a whole second.
STALL = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.count = 0

    def execute(self, requests):
        answers = []
        for request in requests:
            self.count += 1
            time.sleep(1.0 if self.count == {at} else 0.005)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", request.inputs()[0].as_numpy())]))
        return answers
"""
SLEEP_S, LONG_S = 0.5, 2.0


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`wrong` adds 1 to what model.onnx says; `pair` answers two requests at once or none; the others are slow."""
    folder = tmp_path_factory.mktemp("loadtest") / "repository"
    meeting = tmp_path_factory.mktemp("meeting")
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "n"]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "identity", [tensors[0]], [tensors[1]])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    sources = [("wrong", WRONG, 1), ("pair", PAIR.format(folder=str(meeting)), 2)]
    for name in ("sleepy_closed", "sleepy_open"):
        source = SLEEPY.format(sleep_s=SLEEP_S, long_s=LONG_S, record=str(folder.parent / f"{name}.txt"))
        sources.append((name, source, 1))
    sources += [(f"stall_{loop}", STALL.format(at=200), 1) for loop in ("closed", "open")]
    for name, source, instances in sources:
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


def load(
    server: TritonServer, repository: Path, model: str, *more: str, protocol: str = "http", duration_s: float = 2.0
) -> tuple[int, dict[str, Any]]:
    url = server.grpc_url if protocol == "grpc" else server.http_url
    command = [sys.executable, "-m", "loadtest", "--json", "--model", model, "--model-repository", str(repository)]
    command += ["--protocol", protocol, "--url", url, "--lengths", "4..8", "--requests", "16"]
    command += ["--duration-s", str(duration_s), "--warmup-s", "0", "--metrics-url", server.metrics_url, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert done.stdout.startswith("{"), done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_wrong_answer_is_a_failure(server: TritonServer, repository: Path, protocol: str):
    code, result = load(server, repository, "wrong", "--users", "1", protocol=protocol, duration_s=1.0)
    assert code == 1
    assert result["latency"]["count"] == 0
    assert sum(result["failures"].values()) > 0
    assert all("off by" in failure for failure in result["failures"]), result["failures"]


def test_two_grpc_users_of_one_process_overlap(server: TritonServer, repository: Path):
    """locust 1016, grpc 23247: a call that blocks gevent would leave the second user waiting for ever."""
    _, result = load(server, repository, "pair", "--users", "2", protocol="grpc")
    assert result["latency"]["count"] > 10, result["failures"]
    assert sum(result["failures"].values()) <= 1, result["failures"]  # the last one, when the other user has stopped


def check_known(result: dict[str, Any], repository: Path, model: str) -> list[float]:
    """The load test's percentiles are those of what the model itself took, which is what it was told to take."""
    took_ms = [float(line) for line in (repository.parent / f"{model}.txt").read_text().split()]
    assert result["failures"] == {}
    known, latency = Latency.of(took_ms), result["latency"]
    assert known.p50_ms == pytest.approx(SLEEP_S * 1e3, rel=0.1)
    assert LONG_S * 1e3 <= known.p99_ms < 2 * LONG_S * 1e3  # a sleep may be late
    assert latency["p50_ms"] == pytest.approx(known.p50_ms, rel=0.02)
    assert latency["p99_ms"] == pytest.approx(known.p99_ms, rel=0.05)
    return took_ms


def test_a_known_latency_is_measured_in_a_closed_loop(server: TritonServer, repository: Path):
    _, result = load(server, repository, "sleepy_closed", "--users", "16", duration_s=5.0)
    check_known(result, repository, "sleepy_closed")


def test_a_known_latency_is_measured_in_an_open_loop_by_two_workers(server: TritonServer, repository: Path):
    """Each of Locust's worker processes makes half of the load; every sample of both is in the result, once."""
    arguments = ("--rate", "60", "--arrivals", "constant", "--processes", "2")
    _, result = load(server, repository, "sleepy_open", *arguments, duration_s=4.0)
    took_ms = check_known(result, repository, "sleepy_open")
    assert result["latency"]["count"] == len(took_ms) == 240
    assert result["generator"]["processes"] == 2


def test_a_stall_shows_in_an_open_loop_and_hides_in_a_closed_one(
    server: TritonServer, repository: Path, tmp_path: Path
):
    """Two closed users lose two requests to the stall; of an open loop's, all that were due in that second."""
    _, closed = load(server, repository, "stall_closed", "--users", "2", duration_s=4.0)
    assert closed["latency"]["max_ms"] > 990
    assert closed["latency"]["p99_ms"] < 500
    assert any("coordinated omission" in note for note in closed["notes"])
    arguments = ("--rate", "80", "--report", str(tmp_path), "--ceiling-s", "0.5")
    _, opened = load(server, repository, "stall_open", *arguments, duration_s=5.0)
    assert opened["latency"]["p99_ms"] > 800
    assert opened["failures"] == closed["failures"] == {}
    page = (tmp_path / "report.html").read_text()
    assert "counts from the moment at which a request was due" in page
    assert "against a model that does nothing" in page.lower()
    assert re.findall(r'(?:src|href|srcset)="(?!data:)', page) == []  # self-contained
    assert json.loads((tmp_path / "report.json").read_text()) == opened
    assert opened["generator"]["ceiling"]["throughput_rps"] > opened["throughput_rps"]


def test_locust_itself_writes_the_report_and_keeps_the_gate(server: TritonServer, repository: Path, tmp_path: Path):
    """Locust's command line, with a master and two workers; P99 under a tenth of a millisecond is not to be had."""
    command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "InferHttpUser", "--headless"]
    command += ["-u", "4", "-r", "4", "-t", "3s", "--processes", "2", "--host", f"http://{server.http_url}"]
    command += ["--model", "stall_open", "--model-repository", str(repository), "--lengths", "4..8"]
    command += ["--metrics-url", server.metrics_url]
    command += ["--report", str(tmp_path), "--p99-ms", "0.1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert done.returncode == 1, done.stderr
    result = json.loads((tmp_path / "report.json").read_text())
    assert result["failures"] == {}
    assert result["latency"]["count"] > 50
    assert [check["passed"] for check in result["gate"]] == [True, False]
    assert result["stages"][0]["server"]["compute_infer_ms"] > 4


def test_requests_through_shared_memory_are_right(server: TritonServer, repository: Path):
    code, result = load(server, repository, "stall_open", "--users", "2", protocol="system-shm", duration_s=1.0)
    assert code == 0, result["failures"]
    assert result["latency"]["count"] > 20
    code, result = load(server, repository, "wrong", "--users", "1", protocol="system-shm", duration_s=1.0)
    assert code == 1
    assert all("off by" in failure for failure in result["failures"]), result["failures"]


def test_the_highest_rate_that_holds_is_below_what_the_server_can_do(server: TritonServer, repository: Path):
    """5 ms a request, one after the other: 200 a second at most."""
    arguments = ("--search", "--p99-ms", "100", "--precision", "0.6")
    code, result = load(server, repository, "stall_closed", *arguments, duration_s=1.5)
    assert code == 0
    assert 0 < result["search"][-1]["highest"] < 200
    assert result["latency"]["p99_ms"] <= 100


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
