"""TritonServer and `ortgraph serve` on the real server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest

from ortgraph.server import ModelState, ServerError, TritonServer

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


def add_model(repository: Path, name: str, *, config: str = CONFIG, initialize: str | None = "pass") -> None:
    """A Python model; `initialize` None leaves its model.py away."""
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(config)
    if initialize is not None:
        (repository / name / "1" / "model.py").write_text(MODEL_PY.format(initialize=initialize))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    add_model(folder, "good")
    add_model(folder, "broken", initialize="raise ValueError('the reason is here')")
    add_model(folder, "misspelt", config=f"{CONFIG}\nmax_batch_sise: 4\n")
    (folder / "no_version").mkdir()
    (folder / "no_version" / "config.pbtxt").write_text(CONFIG)
    return folder


class Serving:
    """`ortgraph serve` as a process of its own, on free ports."""

    def __init__(self, repository: Path) -> None:
        command = [sys.executable, "-m", "ortgraph", "serve", "-m", str(repository)]
        ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
        self.process = subprocess.Popen(
            [*command, *ports], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        assert self.process.stdout
        self.output = self.process.stdout

    def lines_until_ready(self) -> list[str]:
        lines: list[str] = []
        while "Ctrl-C" not in "".join(lines):
            line = self.output.readline()
            assert line, lines
            lines.append(line.strip())
        return lines

    def triton(self) -> psutil.Process:
        """The server's process, as soon as it is there."""
        while True:
            assert self.process.poll() is None
            for child in psutil.Process(self.process.pid).children():
                if child.name().startswith("tritonserver"):
                    return child

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(60)
        self.output.close()


def test_a_broken_model_has_its_reason_and_the_good_one_serves(repository: Path):
    server = TritonServer(repository)
    with server:
        models = {model.name: model for model in server.models()}
        assert models["good"].state == "READY"
        assert models["broken"] == ModelState("broken", "1", "UNAVAILABLE", "ValueError: the reason is here")
        assert models["misspelt"].state == models["no_version"].state == "UNAVAILABLE"
        assert 'has no field named "max_batch_sise"' in models["misspelt"].reason
        assert "at least one version must be available" in models["no_version"].reason
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
        with pytest.raises(ServerError, match=rf"HTTP port {port} on 127.0.0.1 cannot be used"):
            TritonServer(repository, http_port=port).start()
    with TritonServer(repository, http_port=port) as second:
        assert second.http_url == f"127.0.0.1:{port}"


def test_a_missing_repository_and_a_bad_argument_are_named(repository: Path, tmp_path: Path):
    with pytest.raises(ServerError, match=r"is not a folder"):
        TritonServer(tmp_path / "nowhere").start()
    with pytest.raises(ServerError, match=r"ended with code 1: .*unrecognized option '--no-such-option'"):
        TritonServer(repository, extra_args=["--no-such-option"]).start()
    with pytest.raises(ServerError, match=r"HTTP port 70000 on 127.0.0.1 cannot be used: a port is 0 to 65535"):
        TritonServer(repository, http_port=70000).start()


def test_a_model_that_would_keep_triton_waiting_for_ever_is_named(tmp_path: Path):
    add_model(tmp_path, "no_code", initialize=None)
    server = TritonServer(tmp_path)
    with pytest.raises(ServerError, match=r"keeps the server from starting: .*/no_code/1/model.py"):
        server.start()
    assert server.pid == 0


def test_progress_names_the_models_that_load(tmp_path: Path):
    add_model(tmp_path, "slow", initialize="import time; time.sleep(1)")
    seen: list[list[ModelState]] = []
    server = TritonServer(tmp_path)
    try:
        server.start(on_progress=seen.append)
        assert [ModelState("slow", "1", "LOADING", "")] in seen
        assert seen[-1] == [ModelState("slow", "1", "READY", "")]
        with pytest.raises(ServerError, match=r"runs already"):
            server.start()
    finally:
        server.stop()
    with pytest.raises(ServerError, match=r"does not answer"):
        server.models()


def test_serve_says_where_it_listens_and_which_model_failed_and_stops_on_ctrl_c(repository: Path):
    with Serving(repository) as serving:
        lines = serving.lines_until_ready()
        text = "\n".join(lines)
        assert "READY   good version 1" in text
        assert "FAILED  broken: ValueError: the reason is here" in text
        url = next(line.split()[1] for line in lines if line.startswith("HTTP"))
        with urllib.request.urlopen(f"{url}/v2/health/live", timeout=5) as answer:
            assert answer.status == 200
        serving.process.send_signal(signal.SIGINT)
        rest = serving.output.read()
        assert serving.process.wait(60) == 0
        assert "Stopped." in rest


def test_ctrl_c_while_a_model_loads_stops_at_once(tmp_path: Path):
    add_model(tmp_path, "endless", initialize="import time; time.sleep(10000)")
    with Serving(tmp_path) as serving:
        triton = serving.triton()
        while not (stubs := triton.children()):
            assert serving.process.poll() is None
        serving.process.send_signal(signal.SIGINT)
        assert "Stopped." in serving.output.read()
        assert serving.process.wait(60) == 0
        assert psutil.wait_procs([triton, *stubs], timeout=60)[1] == []


def test_serve_ends_with_an_error_when_the_server_dies(repository: Path):
    with Serving(repository) as serving:
        serving.lines_until_ready()
        serving.triton().kill()
        assert "error: the server ended with code -9" in serving.output.read()
        assert serving.process.wait(60) == 1


def test_the_server_ends_when_its_starter_is_killed(repository: Path):
    with Serving(repository) as serving:
        serving.lines_until_ready()
        triton = serving.triton()
        serving.process.kill()
        triton.wait(60)


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
