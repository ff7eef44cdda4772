"""One engine process for a model's instances, on the real server: right answers, its death, its end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.http as http_client
from tritonclient.utils import InferenceServerException

from ortgraph.server import TritonServer
from tests.server.repository import ONE_LINE, graph, parameter, tensor, write
from tests.server.wire import WAIT_S, infer, infer_together, metrics, total

INSTANCES = 3
CONFIG = (
    ONE_LINE
    + "max_batch_size: 8\ndynamic_batching { }\n"
    + f"instance_group [ {{ kind: KIND_CPU count: {INSTANCES} }} ]\n"
    + parameter("engine_process", "on")
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    repository: Path = tmp_path_factory.mktemp("shared") / "models"
    model = graph("(float[batch, n] x) => (float[batch, n] y) { y = Add(x, x) }")
    io = tensor("input", "x", "FP32", [-1]) + tensor("output", "y", "FP32", [-1])
    write(repository, "shared", model, CONFIG + io)
    arguments = ("--model-control-mode=explicit", "--load-model=*")
    with TritonServer(repository, log_path=repository.parent / "triton.log", extra_args=arguments) as running:
        yield running


def engine_of(server: TritonServer) -> psutil.Process:
    """The engine process below this server; instances that start one at the same time leave one."""
    deadline = time.monotonic() + WAIT_S
    while len(found := _engines(server)) != 1:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found[0]


def _engines(server: TritonServer) -> list[psutil.Process]:
    found = psutil.Process(server.pid).children(recursive=True)
    with contextlib.suppress(psutil.NoSuchProcess):
        return [each for each in found if "engine_process" in " ".join(each.cmdline())]
    return []


def ask(server: TritonServer, number: int) -> None:
    x = np.full((1, 1 + number % 5), number, np.float32)
    found = infer(server, "http" if number % 2 else "grpc", "shared", {"x": x})["y"]
    np.testing.assert_array_equal(found, 2 * x, strict=True)


def test_all_instances_share_one_engine(server: TritonServer) -> None:
    engine_of(server)
    assert infer_together([lambda n=n: ask(server, n) for n in range(24)]) == [None] * 24
    deadline = time.monotonic() + WAIT_S
    while total(metrics(server), "ortgraph_requests_total", model="shared", outcome="answered") < 24:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    lines = re.findall(r"ortgraph: shared version 1 loaded .*", server.log_path.read_text())
    assert len(lines) == INSTANCES


def test_after_the_engine_has_died_the_model_serves_on(server: TritonServer) -> None:
    """No request was in flight, so none gets an error; one in flight gets 503 (tests/test_engine_process.py)."""
    engine = engine_of(server)
    engine.send_signal(signal.SIGKILL)
    while engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert infer_together([lambda n=n: ask(server, n) for n in range(12)]) == [None] * 12
    assert engine_of(server).pid != engine.pid


def test_a_request_in_flight_when_the_engine_dies_may_be_sent_again(server: TritonServer) -> None:
    engine = engine_of(server)
    engine.suspend()
    with http_client.InferenceServerClient(server.http_url, concurrency=2) as client:
        tensor_x = http_client.InferInput("x", [1, 2], "FP32")
        tensor_x.set_data_from_numpy(np.ones((1, 2), np.float32))
        sent = client.async_infer("shared", [tensor_x])
        while total(metrics(server), "nv_inference_pending_request_count", model="shared"):
            time.sleep(0.01)
        time.sleep(0.2)  # until it is with the engine; were it not, it would get its answer from the next one
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(InferenceServerException) as caught:
            sent.get_result()
    assert "the engine process ended" in str(caught.value)
    assert caught.value.status() == "503"
    ask(server, 7)


def test_the_engine_ends_when_the_model_is_unloaded(server: TritonServer) -> None:
    engine = engine_of(server)
    with http_client.InferenceServerClient(server.http_url) as client:
        client.unload_model("shared")
        engine.wait(WAIT_S)
        client.load_model("shared")
    ask(server, 3)
