"""A model under load on the real Triton server: for what only shows there, response mode and instances."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.http as http

from ..dtypes import DType
from ..providers.base import Array, HostArrays
from ..server import TritonServer
from .load import TuningError

SLICE_S = 0.5
FIRST_EACH = 2
MAX_EACH = 2000


class ServedSubject:
    """One model of a running server, asked by the load's clients from processes of their own."""

    def __init__(self, model: str, clients: int, loaders: Sequence[Loader], ask: Any) -> None:
        self._model = model
        self._shares = [clients // len(loaders) + (i < clients % len(loaders)) for i in range(len(loaders))]
        self._loaders = loaders
        self._ask = ask
        self.each = FIRST_EACH

    def seconds(self, number: int) -> float:
        """So many requests of each client; the slowest process counts."""
        busy = [(loader, share) for loader, share in zip(self._loaders, self._shares, strict=True) if share]
        for place, (loader, share) in enumerate(busy):
            loader.send(self._model, share, self.each, (number * len(busy) + place) * share * self.each)
        found = [loader.receive() for loader, _ in busy]
        return max(seconds for seconds, _ in found) / sum(requests for _, requests in found)

    def answers(self) -> list[HostArrays]:
        """The answers to every request."""
        return list(self._ask(self._model))


class Loader:
    """A load process; requests by the hundred cost this process nothing."""

    def __init__(self, url: str, bodies: Path) -> None:
        host, port = url.rsplit(":", 1)
        command = [sys.executable, "-m", "ortgraph.tuning.client", host, port, str(bodies)]
        path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # a terminal's Ctrl-C reaches only us
        )

    def send(self, model: str, clients: int, each: int, first: int) -> None:
        """Start a slice."""
        assert self._process.stdin
        job = {"model": model, "clients": clients, "each": each, "first": first}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()

    def receive(self) -> tuple[float, int]:
        """Its seconds and requests. Raises TuningError where a request was not answered."""
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise TuningError("the load process ended")
        found = json.loads(line)
        if found["error"]:
            raise TuningError(f"the server does not answer the load: {found['error']}")
        return float(found["seconds"]), int(found["requests"])

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()


@contextlib.contextmanager
def served(
    configs: Mapping[str, str],
    model_path: Path,
    requests: Sequence[Mapping[str, Array]],
    dtypes: Mapping[str, DType],
    clients: int,
) -> Iterator[list[ServedSubject]]:
    """Serve the same ONNX file under several configs at once, each as a model of its own name.

    Args:
        configs: the text of config.pbtxt by model, without its name and the ONNX file's.

    Raises:
        ServerError: the server cannot be started.
        TuningError: a model does not load or answer.
    """
    with tempfile.TemporaryDirectory(prefix="ortgraph-tune-") as folder, contextlib.ExitStack() as stack:
        repository = Path(folder) / "models"
        for name, text in configs.items():
            version = repository / name / "1"
            version.mkdir(parents=True)
            (version.parent / "config.pbtxt").write_text(text, encoding="utf-8")
            (version / "model.py").write_text("from ortgraph.backend import TritonPythonModel as TritonPythonModel\n")
            for file in model_path.parent.iterdir():  # external data has to lie beside the model
                if file.name not in ("model.py", "model.onnx"):
                    (version / file.name).symlink_to(file.resolve())
            (version / "model.onnx").symlink_to(model_path.resolve())
        server = stack.enter_context(TritonServer(repository, log_path=Path(folder) / "triton.log"))
        for model in server.models():
            if model.state != "READY":
                raise TuningError(f"the server does not load the model: {model.reason}")
        client = stack.enter_context(http.InferenceServerClient(server.http_url, network_timeout=120.0))
        encoded = [_tensors(request, dtypes) for request in requests]
        bodies = Path(folder) / "bodies"
        bodies.write_bytes(pickle.dumps([http.InferenceServerClient.generate_request_body(t) for t in encoded]))
        loaders = [Loader(server.http_url, bodies) for _ in range(min(clients, 4, max(1, (os.cpu_count() or 1) // 4)))]
        for loader in loaders:
            stack.callback(loader.close)

        def ask(model: str) -> Iterator[HostArrays]:
            for tensors in encoded:
                answer = client.infer(model, tensors)
                yield {o["name"]: answer.as_numpy(o["name"]) for o in answer.get_response()["outputs"]}

        subjects = [ServedSubject(name, clients, loaders, ask) for name in configs]
        try:
            _calibrate(subjects, clients)
        except http.InferenceServerException as error:
            raise TuningError(f"the server does not answer the load: {error.message()}") from error
        yield subjects


def _calibrate(subjects: Sequence[ServedSubject], clients: int) -> None:
    """Warm up, and have every slice last about `SLICE_S` at the first subject's speed."""
    for subject in subjects:
        subject.seconds(0)
    per_request = subjects[0].seconds(1)
    each = max(FIRST_EACH, min(MAX_EACH, round(SLICE_S / max(per_request * clients, 1e-6))))
    for subject in subjects:
        subject.each = each


def _tensors(inputs: Mapping[str, Array], dtypes: Mapping[str, DType]) -> list[Any]:
    found = []
    for name, array in inputs.items():
        tensor = http.InferInput(name, list(array.shape), (dtypes[name].triton or "").removeprefix("TYPE_"))
        tensor.set_data_from_numpy(np.ascontiguousarray(array))
        found.append(tensor)
    return found
