"""Sessions under ONNX Runtime's profiler.

On CUDA the profiler of the packaged ONNX Runtime sees only the host's time in a node: the launch of its kernels. So a
second trace is made in a process in which each launch waits for its kernel (CUDA_LAUNCH_BLOCKING=1, which CUDA reads
when a process first uses it): there a node's time is that of the launch and of the kernels together.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime as ort

from ..config import ModelConfig
from ..errors import ModelError
from ..providers.base import Array, HostArrays
from ..providers.host import run_on_host
from ..session import open_session, session_options, specs
from ..signature import Signature
from .inputs import build_signature
from .load import TuningError


@dataclass(frozen=True)
class PlainSession:
    """An open session and how to run it: host arrays in, host arrays out."""

    session: ort.InferenceSession
    signature: Signature
    run: Callable[[dict[str, Array]], HostArrays]


def open_plain(config: ModelConfig, addressed: tuple[str, ...], prefix: str = "") -> PlainSession:
    """A session without graph capture, with a `prefix` under the profiler: it sees nodes, not a replay.

    Raises:
        LoadError: ONNX Runtime cannot load it like this, or it takes or gives more than tensors.
    """
    options = session_options(config)
    if prefix:
        options.enable_profiling = True
        options.profile_file_prefix = prefix
    providers: list[Any] = ["CPUExecutionProvider"]
    if config.execution_provider == "cuda":
        settings = {"device_id": str(config.device_id), "cudnn_conv_algo_search": "HEURISTIC"}
        providers.insert(0, ("CUDAExecutionProvider", {**settings, **config.provider_options}))
        from ..providers import driver

        driver.use_device(config.device_id)  # raises where there is none; ONNX Runtime would run on the CPU instead
    elif config.execution_provider == "webgpu":
        from ..providers.webgpu import find_device

        options.add_provider_for_devices([find_device()], {"enableInt64": "1", **config.webgpu_options})
        providers = []
    session = open_session(config, options, providers)
    inputs, outputs, not_tensors = specs(session)
    if not_tensors:
        raise ModelError(f"{not_tensors[0]}; only tensors of known element types can be profiled")
    signature = build_signature(config, inputs, outputs, addressed)
    dtypes = {spec.name: spec.dtype for spec in inputs + outputs}
    names = [spec.name for spec in outputs]
    return PlainSession(session, signature, lambda feeds: run_on_host(session, dtypes, feeds, names))


def trace(
    config: ModelConfig,
    addressed: tuple[str, ...],
    feeds: dict[str, Array],
    runs: int,
    folder: Path,
    after_run: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:
    """The profiler's events of a new session and so many runs."""
    opened = open_plain(config, addressed, prefix=str(folder / "trace"))
    for _ in range(runs):
        opened.run(feeds)
        after_run()
    found = Path(opened.session.end_profiling())
    events: list[dict[str, Any]] = json.loads(found.read_text(encoding="utf-8", errors="replace"))
    return events


def trace_waiting(
    config: ModelConfig, addressed: tuple[str, ...], feeds: Mapping[str, Array], runs: int, folder: Path
) -> list[dict[str, Any]]:
    """The same in a process in which each launch waits for its kernel.

    Raises:
        TuningError: it failed there.
    """
    job, result = folder / "job", folder / "events"
    job.write_bytes(pickle.dumps((config, addressed, dict(feeds), runs, folder, result)))
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "CUDA_LAUNCH_BLOCKING": "1"}
    command = [sys.executable, "-m", "ortgraph.tuning.traced", str(job)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode or not result.is_file():
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        raise TuningError(f"the model cannot be profiled with waits: {lines[-1]}")
    events: list[dict[str, Any]] = json.loads(result.read_text(encoding="utf-8"))
    return events


def _main(job: Path) -> None:
    *arguments, result = pickle.loads(job.read_bytes())
    result.write_text(json.dumps(trace(*arguments)), encoding="utf-8")


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
