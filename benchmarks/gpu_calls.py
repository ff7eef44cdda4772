"""Which CUDA calls serving makes: `python -m benchmarks.gpu_calls`. Needs an NVIDIA GPU and the package cupti-python.

Counts the runtime's calls with CUPTI while a BERT-base-size encoder with all its buckets captured answers requests of
mixed lengths: what one replay calls, whether anything waits inside it, and whether anything is allocated after ready.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine, report, workload
from benchmarks.in_process import load_config
from ortgraph import Engine
from ortgraph.batch import Request
from ortgraph.errors import RequestError
from ortgraph.server import ROOT

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy_", "cuStreamSynchronize", "cuCtxSynchronize")
ALLOCATES = ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaHostRegister", "cuMemAlloc", "cuMemFree", "cuMemHostAlloc")


def counted(work: Callable[[], None]) -> Counter[str]:
    """The calls of CUDA's runtime and driver while `work` runs, by name."""
    from cupti import cupti

    calls: Counter[str] = Counter()
    domains = {
        cupti.ActivityKind.RUNTIME: cupti.CallbackDomain.RUNTIME_API,
        cupti.ActivityKind.DRIVER: cupti.CallbackDomain.DRIVER_API,
    }

    def complete(activities: list[Any]) -> None:
        for activity in activities:
            kind = cupti.ActivityKind(activity.kind)
            if kind in domains:
                calls[cupti.get_callback_name(domains[kind], activity.cbid)] += 1

    cupti.activity_register_callbacks(lambda: (8 * 1024 * 1024, 0), complete)
    for kind in domains:
        cupti.activity_enable(kind)
    try:
        work()
    finally:
        cupti.activity_flush_all(1)
        for kind in domains:
            cupti.activity_disable(kind)
    return calls


def requests(rng: np.random.Generator, count: int) -> list[Request]:
    """One row each of 8 to 128 tokens."""
    made = []
    for length in rng.integers(8, 129, count):
        ids = rng.integers(0, 30522, (1, length))
        made.append(Request({"input_ids": ids, "attention_mask": np.ones_like(ids)}))
    return made


def matching(calls: Counter[str], names: Sequence[str]) -> dict[str, int]:
    """Those whose name begins so."""
    return {name: count for name, count in calls.items() if name.startswith(tuple(names))}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write JSON; 1 when something waited or was allocated."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_calls", description=__doc__)
    parser.add_argument("--replays", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--output", type=Path, default=report.RESULTS / "gpu_calls.json")
    parsed = parser.parse_args(arguments)
    folder = workload.write(ROOT / ".cache" / "workload", is_fused=False, instances=[1])[1]
    engine = Engine.load(load_config(folder / workload.MODEL, "cuda"))
    provider: Any = engine._provider
    rng = np.random.default_rng(0)
    host_us: list[float] = []
    try:
        slot = provider.slot((1, 16))
        graph = slot.graph

        def replay() -> None:
            for number in range(parsed.replays):
                start = time.perf_counter()
                provider._session.run_with_iobinding(graph.binding, graph.options)
                host_us.append((time.perf_counter() - start) * 1e6)
                if number % 8 == 7:  # the device keeps up, so that the time is the call's and not a full queue's
                    time.sleep(0.01)

        replay()
        provider.stream.synchronize()
        host_us.clear()
        replay()
        provider.stream.synchronize()
        in_replay = counted(replay)
        provider.stream.synchronize()
        median_us = float(np.median(host_us[: parsed.replays]))
        provider.give_back(slot)
        del slot

        def serve() -> None:
            left = parsed.requests
            while left > 0:
                answers = engine.run_batch(requests(rng, min(left, int(rng.integers(1, 33)))))
                assert not any(isinstance(answer, RequestError) for answer in answers)
                left -= len(answers)

        serve()
        in_serving = counted(serve)
    finally:
        engine.close()
    found = {
        "replays": parsed.replays,
        "calls_of_the_replays": dict(in_replay.most_common()),
        "waits_in_the_replays": matching(in_replay, WAITS),
        "host_us_a_replay": median_us,
        "requests": parsed.requests,
        "calls_of_serving": dict(in_serving.most_common()),
        "allocations_in_serving": matching(in_serving, ALLOCATES),
    }
    print(json.dumps(found, indent=1))
    described = machine.describe([])
    described["command"] = "python -m benchmarks.gpu_calls"
    parsed.output.write_text(json.dumps({**described, **found}, indent=1) + "\n")
    return 1 if found["waits_in_the_replays"] or found["allocations_in_serving"] else 0


if __name__ == "__main__":
    sys.exit(main())
