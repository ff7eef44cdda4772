"""`ortgraph profile`, as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from PIL import Image

from ortgraph.config import ModelConfig
from ortgraph.server import ROOT
from ortgraph.tuning import traced
from ortgraph.tuning.load import TuningError
from ortgraph.tuning.trace import summarise
from tests import toys

EMBEDDING, RECOGNITION = (ROOT / "model_repository" / name for name in ("text_embedding", "text_recognition"))


def profile(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ortgraph", "profile", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def measured(*arguments: object) -> dict[str, Any]:
    done = profile(*arguments, "--provider", "cpu", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_an_encoder_by_operator_and_by_node():
    found = measured(EMBEDDING, "--sizes", "batch=2; sequence=16", "--runs", 3)
    assert found["inputs"] == {"input_ids": [2, 16], "attention_mask": [2, 16]}
    assert (found["runs"], found["copies"], list(found["placed"])) == (3, {}, ["cpu"])
    counts = {row["name"]: row["nodes"] for row in found["operators"]}
    assert (counts["Attention"], counts["SkipLayerNormalization"], counts["BiasGelu"]) == (6, 12, 6)
    assert sum(counts.values()) == len(found["nodes"]) == found["placed"]["cpu"]["nodes"]
    for kind in ("operators", "nodes"):
        times = [row["host_ms"] for row in found[kind]]
        assert times == sorted(times, reverse=True)
        assert sum(times) == pytest.approx(found["placed"]["cpu"]["host_ms"], abs=0.05)
    assert found["operators"][0]["name"] == "MatMul"
    assert min(found[key] for key in ("load_ms", "first_ms", "steady_ms", "steady_without_profiler_ms")) > 0


def test_sizes_by_axis_and_a_chart(tmp_path: Path):
    chart = tmp_path / "new" / "time.png"
    found = measured(RECOGNITION, "--sizes", "x[0]=2; x[3]=320", "--runs", 1, "--chart", chart)
    assert found["inputs"] == {"x": [2, 3, 48, 320]}
    with Image.open(chart) as image:
        assert image.size[0] > 1000
        assert len(np.unique(np.asarray(image.convert("L")))) > 10
    assert [path.name for path in chart.parent.iterdir()] == ["time.png"]
    done = profile(RECOGNITION, "--chart", chart)
    assert (done.returncode, done.stderr) == (1, f"error: {chart} is there already; --force replaces it\n")


def test_one_own_inputs(tmp_path: Path):
    ids = np.arange(14).reshape(2, 7)
    np.savez(tmp_path / "inputs.npz", input_ids=ids, attention_mask=np.ones_like(ids))
    found = measured(EMBEDDING / "1" / "model.onnx", "--inputs", tmp_path / "inputs.npz", "--runs", 1)
    assert found["inputs"] == {"input_ids": [2, 7], "attention_mask": [2, 7]}


def test_the_table_names_the_longest_operator():
    done = profile(EMBEDDING, "--runs", 2, "--provider", "cpu", "--sizes", "sequence=32")
    assert (done.returncode, done.stderr) == (0, "")
    assert "text_embedding on cpu: input_ids [1, 32], attention_mask [1, 32]" in done.stdout
    assert "no copies between host and device" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.strip().startswith("MatMul ")]
    assert rows[0][:3] == ["MatMul", "19", "cpu"]


def test_the_time_of_a_loop_is_not_counted_twice(tmp_path: Path):
    body = helper.make_graph(
        [
            helper.make_node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
            helper.make_node("Mul", ["w", "f"], ["s"]),
            helper.make_node("MatMul", ["s", "w"], ["m"], name="inner"),
            helper.make_node("Identity", ["c"], ["d"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
        ],
        [
            helper.make_tensor_value_info("d", TensorProto.BOOL, []),
            helper.make_tensor_value_info("m", TensorProto.FLOAT, [200, 200]),
        ],
    )
    loop = helper.make_node("Loop", ["n", ""], ["y"], name="outer", body=body)
    made = toys.model(
        [loop], [("n", toys.I64, [])], [("y", toys.F32, [None, 200, 200])], {"w": np.ones((200, 200), "f")}
    )
    onnx.save(made, tmp_path / "loop.onnx")
    np.savez(tmp_path / "n.npz", n=np.array(20))
    found = measured(tmp_path / "loop.onnx", "--inputs", tmp_path / "n.npz", "--runs", 3)
    nodes = {row["name"]: row["host_ms"] for row in found["nodes"]}
    assert 0 < nodes["outer"] < nodes["inner"]
    assert sum(nodes.values()) <= found["steady_ms"] * 1.5


def test_a_second_trace_gives_the_time_with_the_device(tmp_path: Path):
    """A process of its own makes it, there on the CPU; its times count for nodes that are not on the CPU."""
    ids = np.ones((1, 8), np.int64)
    config = ModelConfig("model", "1", EMBEDDING / "1" / "model.onnx", execution_provider="cpu")
    feeds = {"input_ids": ids, "attention_mask": ids}
    events = traced.trace(config, (), feeds, 3, tmp_path)
    waited = traced.trace_waiting(config, (), feeds, 3, tmp_path)
    assert len(waited) == len(events)
    assert all(node.device_ms is None for node in summarise(events, waited).nodes)
    for event in (*events, *waited):
        if "provider" in event["args"]:
            event["args"]["provider"] = "CUDAExecutionProvider"
    found = summarise(events, waited)
    assert {node.name: node.device_ms for node in found.nodes} == {
        node.name: node.host_ms for node in summarise(waited).nodes
    }
    assert [node.ms for node in found.nodes] == [node.device_ms for node in found.nodes]
    with pytest.raises(TuningError, match=r"^the model cannot be profiled with waits: .*model\.onnx is missing"):
        traced.trace_waiting(replace(config, model_path=tmp_path / "model.onnx"), (), feeds, 3, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "there is no file or folder nowhere"),
        (["README.md"], "ONNX Runtime cannot load README.md: Protobuf parsing failed.; the file is not an ONNX model"),
        (["src"], "there is no file src/config.pbtxt"),
        (["EMBEDDING", "--sizes", "sequence=0"], "--sizes must be 'name=size,size;"),
        (["EMBEDDING", "--sizes", "sequence=8,16"], "--sizes takes one size for each dimension, got several"),
        (["EMBEDDING", "--sizes", "sequence=600000000"], "input 'input_ids' would have 600,000,000 elements"),
        (["EMBEDDING", "--sizes", "length=8"], "--sizes: the model has no dynamic dimension 'length'"),
        (["EMBEDDING", "--inputs", "nowhere.npz"], "there is no file nowhere.npz"),
        (["EMBEDDING", "--inputs", "README.md"], "README.md is not an .npz file of plain arrays"),
        (["EMBEDDING", "--chart", "time.pdf"], "--chart must end in .png or .svg, got 'time.pdf'"),
        (["EMBEDDING", "--provider", "tpu"], "--provider must be auto, cpu, cuda or webgpu, got 'tpu'"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    done = profile(*(str(EMBEDDING) if word == "EMBEDDING" else word for word in arguments))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {message}")
    assert done.stderr.count("\n") == 1


def test_inputs_that_do_not_fit_are_named(tmp_path: Path):
    np.savez(tmp_path / "part.npz", input_ids=np.ones((1, 4), np.int64))
    np.savez(tmp_path / "more.npz", ids=np.ones((1, 4), np.int64))
    for name, message in (
        ("part", "--inputs has no array for the input 'attention_mask'"),
        ("more", "--inputs has 'ids', which is not an input; the inputs are input_ids, attention_mask"),
    ):
        done = profile(EMBEDDING, "--inputs", tmp_path / f"{name}.npz")
        assert (done.returncode, done.stderr) == (1, f"error: {message}\n")


def test_usage_errors_and_help():
    assert profile(EMBEDDING, "--runs", 0).returncode == 2
    assert "Example: ortgraph profile" in profile("--help").stdout
