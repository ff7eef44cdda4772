"""`ortgraph profile` and `ortgraph tune` on an NVIDIA GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx

from models.encoder import TINY, build
from tests import tuned


def command(*arguments: object) -> dict[str, Any]:
    """In a process of its own: it is the first to use CUDA there."""
    line = [sys.executable, "-m", "ortgraph", *map(str, arguments), "--json"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def encoder_on_a_gpu(folder: Path) -> Path:
    encoder = tuned.write(folder)
    config = tuned.CONFIG.replace("KIND_CPU", "KIND_GPU").replace("TYPE_FP32", "TYPE_FP16")
    (encoder / "config.pbtxt").write_text(config)
    onnx.save(build(replace(TINY, dtype="fp16"), seed=3), encoder / "1" / "model.onnx")
    return encoder


def test_a_profile_tells_launches_from_kernels(tmp_path: Path):
    found = command("profile", encoder_on_a_gpu(tmp_path), "--sizes", "batch=4; sequence=16", "--runs", 5)
    assert found["provider"] == "cuda"
    placed = found["placed"]["cuda"]
    assert placed["nodes"] > 10
    assert placed["device_ms"] > 0
    assert all(row["device_ms"] is not None for row in found["operators"] if row["provider"] == "cuda")


def test_a_bucket_table_and_graph_or_eager(tmp_path: Path):
    encoder = encoder_on_a_gpu(tmp_path)
    results = tmp_path / "results.json"
    found = command("tune", encoder, *tuned.LOAD, "--budget-s", 60, "--results", results)
    assert found["provider"] == "cuda"
    assert found["graph_or_eager"]["refused"] == {}
    assert {row["winner"] for row in found["graph_or_eager"]["rows"]} <= {"graph", "eager"}
    assert found["buckets"]["waste"] <= 0.011
    assert found["buckets"]["count"] <= len(found["buckets"]["measured_ms"])
    assert "graph or eager" in {entry["axis"] for entry in found["measurements"]}
    assert all(not entry["refused"] for entry in found["measurements"])
