"""What becomes of CUDA's errors, with a session and a provider that only fail: no GPU is needed."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ortgraph import trial
from ortgraph.errors import OrtgraphError, RunError
from ortgraph.session import gpu_reason
from tests import toys
from tests.toys import refused

pytest.importorskip("cuda.bindings")

from cuda.bindings import runtime as rt

from ortgraph.providers import cuda, driver
from ortgraph.providers.driver import CudaError

LOST = "CUDA failure 700: an illegal memory access was encountered ; GPU=0"
FULL = CudaError("cudaMallocHost of 9 bytes", rt.cudaError_t.cudaErrorMemoryAllocation)
IN_CAPTURE = CudaError("cudaDeviceSynchronize", rt.cudaError_t.cudaErrorStreamCaptureUnsupported)


@pytest.mark.parametrize(("said", "is_healthy"), [(LOST, False), ("indices element out of data bounds", True)])
def test_an_eager_run_that_loses_the_context_ends_the_providers_health(
    tmp_path: Path, said: str, is_healthy: bool
) -> None:
    def run(*_: Any) -> None:
        raise Exception(f"[ONNXRuntimeError] : 1 : FAIL : {said}")

    provider = object.__new__(cuda.CudaProvider)
    provider._session = SimpleNamespace(run_with_ort_values=run)
    provider._session_lock = threading.Lock()
    provider._dtypes = {"x": toys.dtype_of("tensor(float)")}
    provider._eager = None
    provider._reason = partial(gpu_reason, config=toys.config(tmp_path))
    with refused(RunError, said):
        provider.run_eager({"x": np.ones(1, np.float32)}, ["y"])
    assert provider.is_healthy is is_healthy


@pytest.mark.parametrize(
    ("in_capture", "after", "is_healthy", "wanted"),
    [
        ({}, None, True, ("passed", "")),
        ({(1,): "no node for it"}, None, True, ("refused", "no node for it")),
        ({(1,): LOST}, None, True, ("lost", LOST)),
        (FULL, None, True, ("refused", str(FULL))),
        (RunError("CUDA: cudaEventSynchronize failed"), None, False, ("lost", "CUDA: cudaEventSynchronize failed")),
        ({(1,): "no node for it"}, IN_CAPTURE, True, ("lost", str(IN_CAPTURE))),
    ],
)
def test_only_a_lost_context_counts_as_lost_in_a_trial(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_capture: dict[tuple[int, ...], str] | OrtgraphError,
    after: CudaError | None,
    is_healthy: bool,
    wanted: tuple[str, str],
) -> None:
    def capture(buckets: Any) -> dict[tuple[int, ...], str]:
        if isinstance(in_capture, OrtgraphError):
            raise in_capture
        return in_capture

    def synchronize() -> None:
        if after is not None:
            raise after

    slot = SimpleNamespace(launch=lambda outputs: SimpleNamespace(wait=dict))
    provider = SimpleNamespace(
        capture=capture,
        slot=lambda bucket: slot,
        inputs=(),
        output_names=(),
        is_healthy=is_healthy,
        stream=SimpleNamespace(synchronize=lambda: None),
    )
    monkeypatch.setattr(cuda, "CudaProvider", lambda config: provider)
    monkeypatch.setattr(driver, "synchronize", synchronize)
    assert trial._try(trial.Job(toys.config(tmp_path), (1,), {})) == wanted
