"""`ortgraph add`, `inspect` and `doctor` on an NVIDIA GPU: captures are made, placement and driver are seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from typer.testing import CliRunner

from models.encoder import TINY, build
from ortgraph import Engine
from ortgraph.cli import app, pbtxt
from tests import toys


def run(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_an_added_model_is_captured_and_right(tmp_path: Path) -> None:
    file = tmp_path / "encoder.onnx"
    onnx.save(build(TINY, seed=3), file)
    said = run("add", str(file), "-m", str(tmp_path / "models"), "--max-batch-size", "4")
    assert said["decisions"]["captured"] == "yes, every bucket; each replay was compared with an eager run"
    folder = Path(said["directory"])
    engine = Engine.load(pbtxt.settings(pbtxt.read(folder / "config.pbtxt"), folder / "1" / "model.onnx", kind="GPU"))
    ids = np.random.default_rng(1).integers(1, TINY.vocab, (2, 11))
    feed = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    right = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"]).run(["embedding"], feed)[0]
    np.testing.assert_allclose(engine.run(feed)["embedding"], right, rtol=1e-2, atol=1e-2)
    engine.close()


def test_sizes_without_buckets_are_captured_as_they_come(tmp_path: Path) -> None:
    said = run("add", str(toys.save(toys.reduce("ReduceMean"), tmp_path)), "-m", str(tmp_path / "m"), "--name", "toy")
    assert said["decisions"]["captured"].startswith("as they are seen, up to 16 exact shapes")


def test_nodes_are_placed_on_the_gpu(tmp_path: Path) -> None:
    said = run("inspect", str(toys.save(toys.encoder(), tmp_path)))
    assert len(said["placement"]["CUDAExecutionProvider"]["nodes"]) > 3


def test_the_driver_and_the_cuda_provider_fit() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    findings = [(found["topic"], found["level"]) for found in json.loads(done.stdout)["findings"]]
    assert ("GPU", "ok") in findings, done.stdout
