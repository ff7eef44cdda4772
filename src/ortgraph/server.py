"""Start, watch and stop a real Triton server on a model repository. For commands, tests and benchmarks.

The server is the one inside the nvidia-pytriton wheel, unpacked by `ortgraph fetch`, or any other `tritonserver` whose
files are named by TRITON_SERVER and TRITON_BACKENDS (inside Triton's container, or on a GPU host).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from .errors import OrtgraphError
from .serverlog import ModelState, first_line, last_error, loading_states, models_not_tried, stuck_reason

__all__ = ["ROOT", "Installation", "ModelState", "ServerError", "TritonServer"]

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
_DRAIN_S = 10  # how long Triton waits for open connections when it stops; less than STOP_TIMEOUT_S
_POLL_S = 0.1
# Run in the server's place before it: ask to be ended when the process that started us dies (prctl PR_SET_PDEATHSIG),
# then become the server, with the same process id. A `preexec_fn` is not safe beside other threads.
_BECOME_SERVER = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"


class ServerError(OrtgraphError):
    """The server cannot be started, or died; one line says why."""


@dataclass(frozen=True)
class Installation:
    """Where the server's files are: the program, the folder of its own libraries (or None), the backends."""

    program: Path
    libraries: Path | None
    backends: Path

    @staticmethod
    def find() -> Installation:
        """The one named by the environment, else the one fetched into .triton.

        Raises:
            ServerError: there is none.
        """
        program, backends = os.environ.get("TRITON_SERVER"), os.environ.get("TRITON_BACKENDS")
        if program and backends:
            libraries = os.environ.get("TRITON_LIBRARIES")
            return Installation(Path(program), Path(libraries) if libraries else None, Path(backends))
        folder = ROOT / ".triton"
        found = Installation(folder / "bin" / "tritonserver", folder / "lib", folder / "backends")
        if not found.program.is_file():
            raise ServerError(f"there is no Triton server in {folder}; run 'ortgraph fetch' (or 'make setup')")
        return found


class TritonServer:
    """A server process on a model repository; a context manager that stops it.

    Args:
        repository: the model repository.
        host: the address to listen on.
        http_port, grpc_port, metrics_port: 0 takes a free one.
        log_path: where the server's output goes; by default a temporary file.
        extra_args: further arguments of `tritonserver`.
        env: variables on top of this process's environment.
    """

    def __init__(
        self,
        repository: Path,
        *,
        host: str = "127.0.0.1",
        http_port: int = 0,
        grpc_port: int = 0,
        metrics_port: int = 0,
        log_path: Path | None = None,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.repository = Path(repository).resolve()
        self.host = host
        self._ports = (http_port, grpc_port, metrics_port)
        self._own_log = log_path is None
        self.log_path = log_path or Path(tempfile.mkstemp(prefix="ortgraph-triton-", suffix=".log")[1])
        self._extra_args = tuple(extra_args)
        self._env = dict(env or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._shm_prefix = f"ortgraph_{os.getpid()}_{id(self):x}_"

    @property
    def _reach(self) -> str:
        """The address at which this machine reaches the server."""
        return "127.0.0.1" if self.host in ("0.0.0.0", "") else self.host

    @property
    def http_url(self) -> str:
        """`host:port` as tritonclient.http takes it."""
        return f"{self._reach}:{self._ports[0]}"

    @property
    def grpc_url(self) -> str:
        """`host:port` as tritonclient.grpc takes it."""
        return f"{self._reach}:{self._ports[1]}"

    @property
    def metrics_url(self) -> str:
        """The URL of the Prometheus page."""
        return f"http://{self._reach}:{self._ports[2]}/metrics"

    @property
    def pid(self) -> int:
        """The server's process id, 0 when it does not run."""
        return self._process.pid if self._process and self._process.poll() is None else 0

    def start(
        self, timeout_s: float = START_TIMEOUT_S, on_progress: Callable[[list[ModelState]], None] | None = None
    ) -> None:
        """Start and wait until the server answers and every model is READY or UNAVAILABLE.

        Call it from a thread that lives as long as the server should: the server ends with it.

        Args:
            timeout_s: how long to wait.
            on_progress: called ten times a second with what is known of the models; what it raises stops the server.

        Raises:
            ServerError: a port is taken, the repository is missing, or the server ended; nothing is left running.
        """
        if self.pid:
            raise ServerError(f"this server runs already (process {self.pid}); stop it first")
        if not self.repository.is_dir():
            raise ServerError(f"model repository {self.repository} is not a folder")
        installation = Installation.find()
        self._ports = _choose_ports(self.host, self._ports)
        try:
            log = open(self.log_path, "wb")  # noqa: SIM115  # closed below
        except OSError as error:
            raise ServerError(f"the log {self.log_path} cannot be written: {error.strerror}") from error
        with log:
            self._process = subprocess.Popen(
                self._command(installation),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(installation),
                start_new_session=True,  # a terminal's Ctrl-C reaches only us, and we stop the server in order
            )
        try:
            self._wait_ready(timeout_s, on_progress)
        except BaseException:
            self.stop()
            raise

    def _command(self, installation: Installation) -> list[str]:
        http, grpc, metrics = map(str, self._ports)
        return [
            *(sys.executable, "-I", "-S", "-c", _BECOME_SERVER),
            str(installation.program),
            f"--model-repository={self.repository}",
            f"--backend-directory={installation.backends}",
            f"--http-address={self.host}",
            f"--http-port={http}",
            f"--grpc-address={self.host}",
            f"--grpc-port={grpc}",
            f"--metrics-address={self.host}",
            f"--metrics-port={metrics}",
            "--exit-on-error=false",
            f"--backend-config=python,shm-region-prefix-name={self._shm_prefix}",
            f"--exit-timeout-secs={_DRAIN_S}",
            *self._extra_args,
        ]

    def _environment(self, installation: Installation) -> dict[str, str]:
        env = {**os.environ, "ORT_DISABLE_TELEMETRY": "1", **self._env}
        # The stub takes the packages of the python3 that comes first on PATH.
        env["PATH"] = f"{Path(sys.executable).parent}:{env.get('PATH', '')}"
        # Triton's own libraries, and this Python's libpython, which may lie outside the system's folders.
        folders = (installation.libraries, env.get("LD_LIBRARY_PATH"), sysconfig.get_config_var("LIBDIR"))
        env["LD_LIBRARY_PATH"] = ":".join(str(folder) for folder in folders if folder)
        return env

    def _wait_ready(self, timeout_s: float, on_progress: Callable[[list[ModelState]], None] | None) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.check_alive()
            log = self._log()
            if reason := stuck_reason(log):
                raise ServerError(f"a Python model keeps the server from starting: {reason}")
            try:
                models, is_live = self.models(), self._is_live()
            except (OSError, ServerError):
                models, is_live = loading_states(log), False
            if on_progress:
                on_progress(models)
            if is_live and all(model.state in ("READY", "UNAVAILABLE") for model in models):
                return
            time.sleep(_POLL_S)
        raise ServerError(f"the server was not ready after {timeout_s:.0f} s; its log is {self.log_path}")

    def check_alive(self) -> None:
        """Raise ServerError with the log's last words when the server has ended."""
        if self._process is None or self._process.poll() is not None:
            code = self._process.returncode if self._process else None
            raise ServerError(f"the server ended with code {code}: {last_error(self._log())} (log: {self.log_path})")

    def _log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def _is_live(self) -> bool:
        with urllib.request.urlopen(f"http://{self.http_url}/v2/health/live", timeout=5) as answer:
            return bool(answer.status == 200)

    def models(self) -> list[ModelState]:
        """Every model in the repository and what the server says of it.

        Raises:
            ServerError: the server does not answer.
        """
        url = f"http://{self.http_url}/v2/repository/index"
        request = urllib.request.Request(url, data=b"{}", method="POST")
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                found: list[dict[str, Any]] = json.load(answer)
        except (OSError, ValueError) as error:
            raise ServerError(f"the server at {self.http_url} does not answer: {error}") from error
        not_tried = models_not_tried(self._log())
        found += [{"name": name} for name in not_tried.keys() - {model["name"] for model in found}]
        return [
            ModelState(
                name=model["name"],
                version=model.get("version", ""),
                state=model.get("state", "UNAVAILABLE"),
                reason=first_line(model.get("reason", "")) or not_tried.get(model["name"], ""),
            )
            for model in found
        ]

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End the server by its process id; calling it twice is safe."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
        # What is left of its group: itself, or stubs that it did not wait for; they would stay for ever.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        # Memory of stubs that were killed stays otherwise.
        for region in Path("/dev/shm").glob(f"{self._shm_prefix}*"):
            region.unlink(missing_ok=True)
        if self._own_log and process.returncode == 0:
            self.log_path.unlink(missing_ok=True)

    def __enter__(self) -> TritonServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _choose_ports(host: str, wanted: tuple[int, int, int]) -> tuple[int, int, int]:
    """Free ports where 0 was given; a given one must be free."""
    sockets, ports = [], []
    given = [port for port in wanted if port]
    if len(set(given)) < len(given):
        raise ServerError(f"the HTTP, gRPC and metrics ports must differ, got {', '.join(map(str, wanted))}")
    try:
        for name, port in zip(("HTTP", "gRPC", "metrics"), wanted, strict=True):
            held = socket.socket()
            sockets.append(held)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                held.bind((host or "0.0.0.0", port))
            except (OSError, OverflowError) as error:
                reason = error.strerror if isinstance(error, OSError) else "a port is 0 to 65535"
                raise ServerError(f"{name} port {port} on {host} cannot be used: {reason}; choose another") from error
            ports.append(held.getsockname()[1])
    finally:
        for held in sockets:
            held.close()
    return ports[0], ports[1], ports[2]
