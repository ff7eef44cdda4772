"""The cuda provider through the engine: captured buckets, eager runs, lent outputs; answers as on the CPU."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from models.encoder import TINY, build
from ortgraph import Engine, ModelError, parse
from ortgraph.batch import Request
from ortgraph.errors import InvalidRequest

SPEC = replace(TINY, dtype="fp32")
TOLERANCE = 5e-3  # TF32


def config(path: Path, provider: str, **parameters: str) -> dict:
    tensors = [
        {"name": name, "data_type": "TYPE_INT64", "dims": [-1], "allow_ragged_batch": True}
        for name in ("input_ids", "attention_mask")
    ]
    known = {"buckets": "batch=1,2,4,8; sequence=8,16,32", "value_ranges": "input_ids=0..99; attention_mask=0..1"}
    return {
        "max_batch_size": 8,
        "input": tensors,
        "output": [{"name": "embedding", "data_type": "TYPE_FP32", "dims": [SPEC.hidden]}],
        "parameters": {
            k: {"string_value": v} for k, v in {**known, "execution_provider": provider, **parameters}.items()
        },
    }


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoder") / "model.onnx"
    onnx.save(build(SPEC, seed=3), path)
    return path


@pytest.fixture(scope="module")
def engines(model_path: Path):
    pair = [Engine.load(parse(config(model_path, name), model_path=model_path)) for name in ("cuda", "cpu")]
    yield pair
    for engine in pair:
        engine.close()


def requests(rng: np.random.Generator, count: int, longest: int = 32) -> list[Request]:
    made = []
    for length in rng.integers(1, longest + 1, count):
        ids = rng.integers(0, 100, (int(rng.integers(1, 3)), length))
        made.append(Request({"input_ids": ids, "attention_mask": np.ones_like(ids)}))
    return made


def test_every_bucket_is_captured(engines):
    cuda, _ = engines
    assert cuda.findings.notes == []
    assert cuda.provider_name == "cuda"


def test_ragged_batches_equal_the_cpu(engines):
    cuda, cpu = engines
    rng = np.random.default_rng(0)
    for _ in range(50):
        made = requests(rng, int(rng.integers(1, 9)))
        for got, wanted in zip(cuda.run_batch(made), cpu.run_batch(made), strict=True):
            np.testing.assert_allclose(got["embedding"], wanted["embedding"], atol=TOLERANCE)
    assert not [key for key in cuda.metrics.values() if key[0] == "ortgraph_eager_runs_total"]


def test_a_length_beyond_the_buckets_runs_eager(engines):
    cuda, cpu = engines
    ids = np.random.default_rng(1).integers(0, 100, (2, 50))
    inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    np.testing.assert_allclose(cuda.run(inputs)["embedding"], cpu.run(inputs)["embedding"], atol=TOLERANCE)
    assert cuda.metrics.values()["ortgraph_eager_runs_total", (("reason", "no_bucket"),)] == 1


def test_outputs_stay_whole_while_the_next_batches_run(engines):
    cuda, cpu = engines
    rng = np.random.default_rng(2)
    kept = []
    for _ in range(20):
        made = requests(rng, 4)
        kept.append((made, cuda.run_batch(made)))
    for made, answers in kept:
        for got, wanted in zip(answers, cpu.run_batch(made), strict=True):
            np.testing.assert_allclose(got["embedding"], wanted["embedding"], atol=TOLERANCE)


def test_control_flow_runs_eager_with_the_reason_or_is_refused(tmp_path: Path):
    then, other = (
        helper.make_graph(
            [helper.make_node(op, ["x"], ["z"])], op, [], [helper.make_tensor_value_info("z", TensorProto.FLOAT, ["n"])]
        )
        for op in ("Neg", "Abs")
    )
    graph = helper.make_graph(
        [
            helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0),
            helper.make_node("Greater", ["total", "zero"], ["is_positive"]),
            helper.make_node("If", ["is_positive"], ["y"], then_branch=then, else_branch=other),
        ],
        "branching",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])],
        [helper.make_tensor("zero", TensorProto.FLOAT, [], [0.0])],
    )
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    written = {"parameters": {"execution_provider": "cuda", "buckets": "n=4,8"}}
    engine = Engine.load(parse(written, model_path=path))
    np.testing.assert_array_equal(engine.run({"x": np.array([1, 2, 3], np.float32)})["y"], [-1, -2, -3])
    assert any("control flow" in note.lower() for note in engine.findings.notes), engine.findings.notes
    engine.close()
    written["parameters"]["graph_capture"] = "required"
    with pytest.raises(ModelError, match=r"(?i)control flow"):
        Engine.load(parse(written, model_path=path))


def test_gpu_mem_limit_is_named_where_it_is_hit(tmp_path: Path) -> None:
    """In the capture of one bucket, and in a request, which alone gets the error."""
    path = tmp_path / "model.onnx"
    graph = helper.make_graph(
        [
            helper.make_node("Mul", ["x", "x"], ["squares"]),
            helper.make_node("ReduceSum", ["squares"], ["y"], keepdims=0),
        ],
        "squares",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    large = 1 << 24  # 64 MiB
    limit = str(16 << 20)
    parameters = {
        "execution_provider": "cuda", "buckets": f"n=4,{large}", "padding": "off", "gpu_mem_limit": limit,
    }  # fmt: skip
    engine = Engine.load(parse({"parameters": parameters}, model_path=path))
    (note,) = engine.notes
    assert note.startswith("1 of 2 buckets run eager: ")
    assert note.endswith(f"; raise the parameter gpu_mem_limit, now {limit} bytes")
    requests = [Request({"x": np.full(size, 2, np.float32)}) for size in (4, large, 3)]
    first, refused, last = engine.run_batch(requests)
    assert (first["y"], last["y"]) == (16, 12)
    assert isinstance(refused, InvalidRequest)
    assert str(refused).startswith("the model cannot run this request: ")
    assert str(refused).endswith(f"; raise the parameter gpu_mem_limit, now {limit} bytes")
    assert engine.is_healthy
    engine.close()


def test_the_loaded_line_says_what_gpu_memory_was_taken(engines) -> None:
    cuda, _ = engines
    assert re.search(
        r"; GPU memory: \d+ MiB weights and libraries, \d+ MiB arena, graphs and buffers of 12 buckets$", cuda.summary
    )


def test_graph_spec_is_captured(model_path: Path, engines) -> None:
    written = config(model_path, "cuda", graph_capture="required")
    del written["parameters"]["buckets"]
    specs = [
        {"batch_size": rows, "input": {name: {"dim": [str(size)]} for name in ("input_ids", "attention_mask")}}
        for rows, size in ((1, 8), (4, 32))
    ]
    written["optimization"] = {"cuda": {"graphs": True, "graph_spec": specs}}
    engine = Engine.load(parse(written, model_path=model_path))
    assert engine.notes == ()
    assert engine.table.ladders == ((1, 4), (8, 32))
    made = requests(np.random.default_rng(6), 12)
    for got, wanted in zip(engine.run_batch(made), engines[1].run_batch(made), strict=True):
        np.testing.assert_allclose(got["embedding"], wanted["embedding"], atol=TOLERANCE)
    assert not [key for key in engine.metrics.values() if key[0] == "ortgraph_eager_runs_total"]
    engine.close()
