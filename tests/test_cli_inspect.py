"""`ortgraph inspect`: what it says of real models and of small ones whose facts are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

from ortgraph.cli import app
from ortgraph.cli.graphfacts import index_ranges, obstacles, quantised, weights
from tests import real_models, toys
from tests.toys import F32, I64, TEXT, model


def inspect(path: Path, *arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["inspect", str(path), "--json", *arguments])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def dimensions(said: dict[str, Any]) -> dict[str, tuple[bool, str]]:
    return {dim["name"]: (dim["is_padded"], dim["reason"]) for dim in said["dimensions"]}


def test_a_small_model_whose_facts_are_known(tmp_path: Path) -> None:
    file = toys.save(toys.encoder(), tmp_path)
    said = inspect(file)
    assert said["size_bytes"] == file.stat().st_size
    assert (said["ir_version"], said["opsets"]) == (9, {"ai.onnx": 18})
    assert said["tensors"][0] == {"kind": "input", "name": "ids", "type": "INT64", "shape": ["batch", "sequence"]}
    assert dimensions(said) == {"batch": (True, ""), "sequence": (True, "")}
    assert said["operators"]["ReduceSum"] == 2
    assert said["weights"][0] == {"dtype": "FLOAT", "count": 1, "size_bytes": toys.TABLE.nbytes}
    assert said["capture"] == []
    assert list(said["placement"]) == ["CPUExecutionProvider"]
    assert said["placement"]["CPUExecutionProvider"]["operators"]["Gather"] == 1


def test_memory_is_counted_from_the_tensors(tmp_path: Path) -> None:
    """ids and mask of 8 bytes, hidden and mean of 4 floats, each tensor rounded up to 256 bytes."""
    said = inspect(toys.save(toys.encoder(), tmp_path), "--buckets", "batch=1,8; sequence=32,64")
    by_name = {bucket["name"]: bucket for bucket in said["memory"]}
    assert list(by_name) == [f"batch={rows},sequence={length}" for rows in (1, 8) for length in (32, 64)]
    assert by_name["batch=1,sequence=32"]["inputs_bytes"] == 2 * 32 * 8
    assert by_name["batch=8,sequence=64"]["inputs_bytes"] == 2 * 8 * 64 * 8
    assert by_name["batch=8,sequence=64"]["outputs_bytes"] == 8 * (64 * 4 * 4 + 256)


def test_outputs_whose_size_is_a_function_of_the_inputs_are_measured() -> None:
    said = inspect(real_models.path(real_models.RECOGNITION), "--buckets", "batch=1,2; x[2]=48; x[3]=320")
    assert [bucket["outputs_bytes"] for bucket in said["memory"]] == [40 * 6625 * 4 // 256 * 256 + 256] * 1 + [
        2 * (40 * 6625 * 4 // 256 * 256 + 256)
    ]
    padded, reason = dimensions(said)["x[3]"]
    assert not padded
    assert "padded to 320" in reason
    assert dimensions(said)["batch"] == (True, "")
    assert any("Shape" in node for found in said["capture"] for node in found["nodes"])


def test_control_flow_is_named_with_its_mend() -> None:
    said = inspect(real_models.path(real_models.VAD))
    found = next(item for item in said["capture"] if item["reason"] == "control flow")
    assert found["nodes"][0] == "If If_0"
    assert len(found["nodes"]) == 25
    assert found["providers"] == ["cuda", "webgpu"]
    assert found["mend"].startswith("make the scalar input 'sr' a constant")
    assert all(reason.startswith("no trial run succeeded") for _, reason in dimensions(said).values())


def test_a_model_directory_is_inspected_with_its_config(tmp_path: Path) -> None:
    """The latest version, and the config's own limits; what the config does not pad is measured too."""
    folder = tmp_path / "toy"
    for version in ("2", "10"):
        (folder / version).mkdir(parents=True)
        toys.save(toys.affine(), folder / version)
    (folder / "config.pbtxt").write_text(
        """backend: "ortgraph" max_batch_size: 4
        input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
        output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] } ]"""
    )
    said = inspect(folder)
    assert said["file"].endswith("toy/10/model.onnx")
    assert said["max_batch_size"] == 4
    assert dimensions(said) == {"batch": (True, ""), "n": (True, "")}


def test_a_directory_of_one_line_and_an_unbatched_model(tmp_path: Path) -> None:
    folder = tmp_path / "grid"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text('backend: "ortgraph"\n')
    toys.save(toys.grid(), folder / "1")
    said = inspect(folder)
    assert said["max_batch_size"] == 0
    assert dimensions(said)["height"] == (True, "")
    assert "width" in dimensions(said)


def test_the_quantised_parts_of_an_int4_encoder() -> None:
    made = real_models.int4_encoder()
    matrices = sum(node.op_type == "MatMulNBits" for node in made.graph.node)
    assert quantised(made) == [f"MatMulNBits: 4-bit weights, blocks of 32: {matrices} nodes"]


def test_weights_are_counted_by_type_without_their_external_data(tmp_path: Path) -> None:
    rows = np.ones((3, 5), np.float32)
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "toy",
        [helper.make_tensor_value_info("x", F32, ["n"])],
        [helper.make_tensor_value_info("y", F32, ["n"])],
        [
            numpy_helper.from_array(rows, "a"),
            numpy_helper.from_array(rows.astype(np.float16), "b"),
            helper.make_tensor("c", TensorProto.INT4, [3], [1, -2, 3]),
            helper.make_tensor("d", TensorProto.STRING, [2], [b"ab", b"c"]),
        ],
    )
    made = helper.make_model(graph)
    onnx.save(made, tmp_path / "m.onnx", save_as_external_data=True, location="w", size_threshold=16)
    (tmp_path / "w").unlink()
    found = {
        weight.dtype: weight.size_bytes for weight in weights(onnx.load(tmp_path / "m.onnx", load_external_data=False))
    }
    assert found == {"FLOAT": 60, "FLOAT16": 30, "STRING": 3, "INT4": 2}


def test_qdq_nodes_are_named_with_their_type() -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
    ]
    made = model(
        nodes, [("x", F32, ["n"])], [("y", F32, ["n"])], {"scale": np.float32(0.1), "zero": np.array(3, np.int8)}
    )
    assert quantised(made) == ["DequantizeLinear (int8): 1 nodes", "QuantizeLinear (int8): 1 nodes"]


@pytest.mark.parametrize(
    ("nodes", "inputs", "outputs", "reason", "providers"),
    [
        ([helper.make_node("NonZero", ["x"], ["y"], name="n")], [("x", F32, ["n"])], [("y", I64, [1, "m"])],
         "the size of its output depends on values, so the host must wait for it", ("cuda", "webgpu")),
        ([helper.make_node("StringNormalizer", ["x"], ["y"], name="n")], [("x", TEXT, ["n"])], [("y", TEXT, ["n"])],
         "strings live on the host", ("cuda", "webgpu")),
        ([helper.make_node("Shape", ["x"], ["y"], name="n")], [("x", F32, ["n"])], [("y", I64, [1])],
         "a size is computed on the host", ("webgpu",)),
        ([helper.make_node("GatherND", ["x", "at"], ["y"], name="n")], [("x", F32, ["n"])], [("y", F32, [1])],
         "with constant indices its CUDA kernel copies from the host, which can end a capture and the process",
         ("cuda",)),
        ([helper.make_node("SplitToSequence", ["x"], ["s"], name="n"),
          helper.make_node("ConcatFromSequence", ["s"], ["y"], axis=0)], [("x", F32, ["n"])], [("y", F32, ["n"])],
         "sequences and optionals live on the host", ("cuda", "webgpu")),
    ],
)  # fmt: skip
def test_what_forbids_capture(
    nodes: list[onnx.NodeProto], inputs: Any, outputs: Any, reason: str, providers: tuple[str, ...]
) -> None:
    found = obstacles(model(nodes, inputs, outputs, {"at": np.array([[0]])}))
    assert found[0].nodes[0] == f"{nodes[0].op_type} n"
    assert (found[0].reason, found[0].providers) == (reason, providers)
    assert found[0].mend


def test_indices_are_found_through_casts_and_constants() -> None:
    nodes = [
        helper.make_node("Cast", ["ids"], ["small"], to=TensorProto.INT32),
        helper.make_node("Constant", [], ["other"], value=numpy_helper.from_array(np.ones((7, 2), np.float32))),
        helper.make_node("Gather", ["table", "small"], ["a"]),
        helper.make_node("Gather", ["other", "small"], ["b"]),
        helper.make_node("Gather", ["table", "columns"], ["c"], axis=1),
        helper.make_node("Add", ["ids", "ids"], ["twice"]),
        helper.make_node("Gather", ["table", "twice"], ["d"]),
    ]
    inputs = [("ids", I64, ["n"]), ("columns", I64, ["m"])]
    made = model(nodes, inputs, [("a", F32, None)], {"table": toys.TABLE})
    assert index_ranges(made) == {"ids": (0, 6)}


def test_the_text_names_everything(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["inspect", str(toys.save(toys.reduce("ReduceMean"), tmp_path))])
    assert done.exit_code == 0
    for part in (
        "opset ai.onnx 18",
        "batch (x[0]): safe to join (measured)",
        "n (x[1]): not safe to pad: output 'y'",
        "ReduceMean 1",
        "CPUExecutionProvider: 2 nodes",
        "nothing in the graph forbids it",
        "INT64: 1 tensors",
    ):
        assert part in done.stdout  # fmt: skip
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"no model", "is not an ONNX file"), (None, "there is no file")],
)
def test_bad_input_is_one_line(tmp_path: Path, content: bytes | None, said: str) -> None:
    file = tmp_path / "bad.onnx"
    if content is not None:
        file.write_bytes(content)
    done = CliRunner().invoke(app, ["inspect", str(file)])
    assert done.exit_code == 1
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert said in done.stderr


def test_a_folder_that_is_no_model_directory(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert done.stderr == f"error: there is no file {tmp_path / 'config.pbtxt'}\n"
    (tmp_path / "config.pbtxt").write_text('backend: "ortgraph"')
    done = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert done.stderr.endswith("it has no version folder such as 1/\n")
