"""Talk to a server in a test: one call a request, the metrics page as numbers, what the server's processes are."""

from __future__ import annotations

import contextlib
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tritonclient.utils import np_to_triton_dtype

from ortgraph.server import TritonServer

Array = np.ndarray[Any, Any]
Answer = dict[str, Array]
PROTOCOLS = ("http", "grpc")
WAIT_S = 60.0


def infer(
    server: TritonServer, protocol: str, model: str, inputs: Mapping[str, Array], outputs: Sequence[str] = ()
) -> Answer:
    """The outputs of one request. Raises InferenceServerException."""
    module: Any = http_client if protocol == "http" else grpc_client
    url = server.http_url if protocol == "http" else server.grpc_url
    with module.InferenceServerClient(url) as client:
        wanted = [module.InferRequestedOutput(name) for name in outputs] or None
        result = client.infer(model, to_wire(module, inputs), outputs=wanted)
        response = result.get_response() if protocol == "http" else result.get_response(as_json=True)
        return {output["name"]: result.as_numpy(output["name"]) for output in response.get("outputs", [])}


def to_wire(module: Any, inputs: Mapping[str, Array]) -> list[Any]:
    """Arrays as a client module's InferInputs."""
    tensors = []
    for name, array in inputs.items():
        tensor = module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    return tensors


def infer_together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Make all calls at the same time, each on its own thread; what each returned or raised, in order."""
    barrier = threading.Barrier(len(calls))

    def one(call: Callable[[], Any]) -> Any:
        barrier.wait(WAIT_S)
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(one, calls))


def metrics(server: TritonServer) -> dict[str, float]:
    """Every series of the metrics page, `name{labels}`, and its value."""
    with urllib.request.urlopen(server.metrics_url, timeout=WAIT_S) as page:
        lines = page.read().decode().splitlines()
    return {series: float(value) for series, value in (li.rsplit(" ", 1) for li in lines if li and li[0] != "#")}


def total(values: Mapping[str, float], name: str, **labels: str) -> float:
    """The sum of all series of that name that carry these labels."""
    found = 0.0
    for series, value in values.items():
        base, _, rest = series.partition("{")
        carried = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        if base == name and labels.items() <= carried.items():
            found += value
    return found


def wait_until(is_true: Callable[[], bool], what: str) -> None:
    """Poll. Fails the test after a minute."""
    end = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.1)


@dataclass(frozen=True)
class Stub:
    """The process of a model's instance, and the region in /dev/shm over which the server talks to it."""

    pid: int
    region: Path


def stubs(server: TritonServer) -> dict[str, Stub]:
    """Every instance's process, by the instance's name."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                if words[0].endswith("triton_python_backend_stub") and parent == server.pid:
                    # program, model.py, region, ..., instance, backend's folder, "" after the last zero byte
                    found[words[-3]] = Stub(int(entry.name), Path("/dev/shm") / words[2])
    return found


def stub_pids(server: TritonServer) -> dict[str, int]:
    """Each instance's process id, by the instance's name."""
    return {name: stub.pid for name, stub in stubs(server).items()}
