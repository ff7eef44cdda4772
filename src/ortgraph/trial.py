"""A model's first capture on CUDA, tried in a process of its own: it can lose the CUDA context, or kill the process.

`main` reads what to try from standard input (a pickle of `Job`), opens the CUDA provider, captures
one bucket, replays it, and prints one line of JSON: `result` is "passed", "refused" (an ordinary error, which the
serving process will meet and handle too) or "lost" (the context is gone), with a `reason`.

A passed trial is remembered in a file, so that the next load of the same model on the same GPU makes none. Where the
folder cannot be written the trial is made again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import onnxruntime as ort

from . import child
from .config import ModelConfig
from .errors import LoadError, OrtgraphError, first_line
from .signature import Shape, Sizes

_INSIST = "graph_capture: required captures without a trial"


@dataclass(frozen=True)
class Job:
    """What to try: a bucket of a model, with its input shapes."""

    config: ModelConfig
    bucket: Sizes
    shapes: Mapping[str, Shape]


def danger(job: Job, gpu: str, timeout_s: float, command: Sequence[str] | None = None) -> str:
    """Why this process should not capture the model's graphs, or an empty string.

    Processes that ask at once wait for the trial of the first.

    Args:
        gpu: the GPU's name; a trial counts for this one only.
        command: what to run; by default this module in a fresh Python. Without a Python there is no trial.
    """
    command = command or child.python_command(__name__)
    if not command:
        return ""
    with _passed_file(job.config, gpu) as passed:
        if passed is not None and passed.read():
            return ""
        problem, is_passed = run(command, job, timeout_s)
        if passed is not None and is_passed:
            with contextlib.suppress(OSError):
                passed.write(json.dumps({"model": str(job.config.model_path), "gpu": gpu}) + "\n")
                passed.flush()
    return f"{problem}; {_INSIST}" if problem else ""


def run(command: Sequence[str], job: Job, timeout_s: float) -> tuple[str, bool]:
    """Run the trial: what went wrong that a serving process would not survive, and whether the trial passed."""
    try:
        done = subprocess.run(
            command,
            input=pickle.dumps(job),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=timeout_s,
            env=child.environment(),
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"a trial capture in a process of its own did not end within {timeout_s:.0f} s", False
    except OSError:
        return "", False
    if done.returncode < 0:
        try:
            name = signal.Signals(-done.returncode).name
        except ValueError:
            name = "a signal"
        return f"a trial capture in a process of its own died of {name} ({-done.returncode})", False
    try:
        report = json.loads(done.stdout.decode(errors="replace").strip().rsplit("\n", 1)[-1])
        result, reason = str(report["result"]), str(report["reason"])
    except (ValueError, KeyError, TypeError):
        if done.returncode:
            return f"a trial capture in a process of its own ended with exit code {done.returncode}", False
        return "", False
    if result == "lost":
        return f"a trial capture in a process of its own lost the CUDA context: {reason}", False
    return "", result == "passed"


def _key(config: ModelConfig, gpu: str) -> str:
    """What a trial depends on."""
    status = config.model_path.stat()
    file = (str(config.model_path.resolve()), status.st_size, status.st_mtime_ns)
    settings = (config.provider_options, config.session_config, config.graph_level, config.execution_mode)
    return hashlib.sha256(repr((file, settings, ort.__version__, gpu)).encode()).hexdigest()[:32]


@contextlib.contextmanager
def _passed_file(config: ModelConfig, gpu: str) -> Iterator[IO[str] | None]:
    """The locked file that a passed trial is written to, empty before; None where it cannot be had."""
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(cache) / "ortgraph" if cache else Path(tempfile.gettempdir()) / f"ortgraph-{os.getuid()}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.lstat().st_uid != os.getuid():  # made by somebody else in the temp folder
            raise PermissionError
        file = (folder / f"trial-{_key(config, gpu)}").open("a+", encoding="utf-8")
    except OSError:
        yield None
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield None
            return
        file.seek(0)
        yield file


def main() -> None:
    """The child process; ends without clean-up, for what a crash at exit would say is not asked here."""
    job: Job = pickle.load(sys.stdin.buffer)
    start = time.perf_counter()
    result, reason = _try(job)
    print(json.dumps({"result": result, "reason": reason, "seconds": time.perf_counter() - start}), flush=True)
    os._exit(0)


def _try(job: Job) -> tuple[str, str]:
    try:
        from .providers import driver
        from .providers.cuda import CudaProvider
    except ImportError as error:
        return "refused", first_line(error)
    try:
        provider = CudaProvider(replace(job.config, graph_capture="required"))
    except LoadError as error:
        return "lost" if driver.is_sticky(error) else "refused", str(error)
    try:
        reason = provider.capture({job.bucket: job.shapes}).get(job.bucket, "")
        if not reason:
            slot = provider.slot(job.bucket)
            for spec in provider.inputs:
                if spec.name in job.shapes:
                    slot.stage(spec.name, spec.dtype, job.shapes[spec.name])[...] = 0
            slot.launch(provider.output_names).wait()
        driver.synchronize()
        provider.stream.synchronize()
    except OrtgraphError as error:
        is_lost = driver.is_sticky(error) or not provider.is_healthy
        return "lost" if is_lost else "refused", str(error)
    if reason and driver.is_sticky(RuntimeError(reason)):
        return "lost", reason
    return ("refused", reason) if reason else ("passed", "")
