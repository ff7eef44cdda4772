"""Buckets that come and go under load: `python -m benchmarks.bucket_life [REQUESTS]`.

A small encoder on the WebGPU provider, on the real server: more exact shapes than there is room for, a pool of one
generation, four clients. Every answer is compared with plain onnxruntime on the CPU, and the memory of the server's
processes after the run with that after a warm-up which has seen every shape. Without a GPU it runs on SwiftShader
(Debian's chromium-common).
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import psutil
import tritonclient.http as http

from models.encoder import TINY, build
from ortgraph.server import TritonServer

CLIENTS, PLACES, ROWS, LENGTH = 4, 4, 2, 8
TOLERANCE = 1e-4
SWIFTSHADER = Path("/usr/lib/chromium/vk_swiftshader_icd.json")
SPEC = replace(TINY, fused=False, normalise=True)
CONFIG = f"""
backend: "python"
max_batch_size: {ROWS}
dynamic_batching {{ }}
instance_group [ {{ kind: KIND_CPU }} ]
parameters [
  {{ key: "execution_provider" value: {{ string_value: "webgpu" }} }},
  {{ key: "padding" value: {{ string_value: "off" }} }},
  {{ key: "captures_on_demand" value: {{ string_value: "{PLACES}" }} }},
  {{ key: "buffer_pool_generations" value: {{ string_value: "1" }} }},
  {{ key: "debug" value: {{ string_value: "1" }} }},
  {{ key: "value_ranges" value: {{ string_value: "input_ids=0..{SPEC.vocab - 1}; attention_mask=0..1" }} }}
]
"""


def write(repository: Path) -> onnx.ModelProto:
    """The model repository: one encoder."""
    model = build(SPEC, seed=3)
    folder = repository / "encoder" / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text("from ortgraph.backend import TritonPythonModel as TritonPythonModel\n")
    (folder.parent / "config.pbtxt").write_text(CONFIG)
    onnx.save(model, folder / "model.onnx")
    return model


def ask(client: Any, ids: Any) -> Any:
    tensors = []
    for name, array in (("input_ids", ids), ("attention_mask", np.ones_like(ids))):
        tensor = http.InferInput(name, list(array.shape), "INT64")
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    return client.infer("encoder", tensors).as_numpy("embedding")


def load(server: TritonServer, model: onnx.ModelProto, seeds: range, requests: int) -> float:
    """Each client's random requests; the worst difference from the CPU."""
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])

    def work(seed: int) -> float:
        rng, worst = np.random.default_rng(seed), 0.0
        with http.InferenceServerClient(server.http_url, network_timeout=300.0) as client:
            for _ in range(requests):
                ids = rng.integers(0, SPEC.vocab, (int(rng.integers(1, ROWS + 1)), int(rng.integers(1, LENGTH + 1))))
                wanted = session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})[0]
                worst = max(worst, float(np.abs(ask(client, ids) - wanted).max()))
        return worst

    with ThreadPoolExecutor(len(seeds)) as clients:
        return max(clients.map(work, seeds))


def memory_mb(server: TritonServer) -> tuple[float, float]:
    """Private memory of the server's process, and of the processes that run the model."""
    root = psutil.Process(server.pid)
    models = sum(process.memory_full_info().uss for process in root.children(recursive=True))
    return root.memory_full_info().uss / 1e6, models / 1e6


def counts(server: TritonServer) -> dict[str, float]:
    """The counters of buckets and pool."""
    with urllib.request.urlopen(server.metrics_url, timeout=10) as page:
        text = page.read().decode()
    pattern = r"^(ortgraph_(?:pool_\w+|captures_total|live_buckets|eager_runs_total))\{.*\} (\S+)$"
    return {name: float(value) for name, value in re.findall(pattern, text, re.M)}


def main(requests: int) -> int:
    env = {}
    if SWIFTSHADER.is_file() and "VK_DRIVER_FILES" not in os.environ and not Path("/dev/nvidiactl").exists():
        env = {"ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER": "1", "VK_DRIVER_FILES": str(SWIFTSHADER)}
    with tempfile.TemporaryDirectory() as folder:
        model = write(Path(folder) / "models")
        with TritonServer(Path(folder) / "models", log_path=Path(folder) / "triton.log", env=env) as server:
            load(server, model, range(100, 100 + CLIENTS), requests // CLIENTS)
            memory = [memory_mb(server)]
            start = time.perf_counter()
            quarters = [range(CLIENTS * i, CLIENTS * (i + 1)) for i in range(4)]
            worst = 0.0
            for seeds in quarters:
                worst = max(worst, load(server, model, seeds, requests // CLIENTS // len(quarters)))
                memory.append(memory_mb(server))
            seconds = time.perf_counter() - start
            found = counts(server)
    print(f"{requests} requests of {CLIENTS} clients in {seconds:.1f} s; largest difference from the CPU {worst:.1e}")
    print("memory after the warm-up and each quarter, server: " + ", ".join(f"{mb:.1f}" for mb, _ in memory))
    print("  and model: " + ", ".join(f"{mb:.1f}" for _, mb in memory) + " MB")
    print("; ".join(f"{name} {value:.0f}" for name, value in found.items()))
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000))
