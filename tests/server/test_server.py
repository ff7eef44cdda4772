"""TritonServer and `ortgraph serve` on the real server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from ortgraph.server import ServerError, TritonServer

MODEL_PY = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        {initialize}
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""
CONFIG = """
backend: "python"
input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    for name, body in (("good", "pass"), ("broken", "raise ValueError('the reason is here')")):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(CONFIG)
        (folder / name / "1" / "model.py").write_text(MODEL_PY.format(initialize=body))
    return folder


def test_a_broken_model_has_its_reason_and_the_good_one_serves(repository: Path):
    server = TritonServer(repository)
    with server:
        models = {model.name: model for model in server.models()}
        assert models["good"].state == "READY"
        assert (models["broken"].state, models["broken"].reason) == ("UNAVAILABLE", "ValueError: the reason is here")
        with urllib.request.urlopen(f"http://{server.http_url}/v2/models/good/ready", timeout=5) as answer:
            assert answer.status == 200
        assert b"nv_inference_request_success" in urllib.request.urlopen(server.metrics_url, timeout=5).read()
        pid = server.pid
        assert pid > 0
    assert server.pid == 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not server.log_path.exists()
    server.stop()


def test_a_second_start_works_and_a_taken_port_is_named(repository: Path):
    with TritonServer(repository) as first:
        port = int(first.http_url.rsplit(":", 1)[1])
        with pytest.raises(ServerError, match=f"HTTP port {port} on 127.0.0.1 cannot be used"):
            TritonServer(repository, http_port=port).start()
    with TritonServer(repository, http_port=port) as second:
        assert second.http_url == f"127.0.0.1:{port}"


def test_a_missing_repository_and_a_bad_argument_are_named(repository: Path, tmp_path: Path):
    with pytest.raises(ServerError, match="is not a folder"):
        TritonServer(tmp_path / "nowhere").start()
    with pytest.raises(ServerError, match="the server ended with code"):
        TritonServer(repository, extra_args=["--no-such-option"]).start()


def test_serve_says_where_it_listens_and_which_model_failed_and_stops_on_ctrl_c(repository: Path):
    command = [sys.executable, "-m", "ortgraph", "serve", "-m", str(repository)]
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    process = subprocess.Popen(
        [*command, *ports], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        if "Ctrl-C" in line:
            break
    text = "\n".join(lines)
    assert "READY   good version 1" in text
    assert "FAILED  broken: ValueError: the reason is here" in text
    url = next(line.split()[1] for line in lines if line.startswith("HTTP"))
    assert urllib.request.urlopen(f"{url}/v2/health/live", timeout=5).status == 200
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait(60) == 0
    assert "Stopped." in rest
    process.stdout.close()


def test_serve_with_a_taken_port_ends_with_one_line(repository: Path):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "ortgraph", "serve", "-m", str(repository), "--http-port", str(port)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.strip() == (
        f"error: HTTP port {port} on 127.0.0.1 cannot be used: Address already in use; choose another"
    )
