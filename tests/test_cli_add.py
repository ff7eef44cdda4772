"""`ortgraph add`: what it decides, that the engine takes what it writes, and that bad input leaves nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from typer.testing import CliRunner

from ortgraph import Engine
from ortgraph.buckets import default_batch_ladder
from ortgraph.cli import app, pbtxt
from ortgraph.config import parse_buckets
from ortgraph.graph import MAX_BUCKETS
from tests import real_models, toys, vulkan
from tests.toys import F32, I64, model


def add(file: Path, repository: Path, *arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["add", str(file), "-m", str(repository), "--json", *arguments])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def words(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ortgraph", *arguments]


def one_line(done: Any, code: int = 1) -> str:
    """The command failed with this code and one line that says why."""
    text = done.stderr
    assert (done.exit_code if hasattr(done, "exit_code") else done.returncode) == code, text
    assert text.startswith("error: ") and text.count("\n") == 1, text
    return str(text).removeprefix("error: ").strip()


def refused(file: Path, repository: Path, *arguments: str) -> str:
    done = CliRunner().invoke(app, ["add", str(file), "-m", str(repository), *arguments])
    assert not repository.exists()
    return one_line(done)


def config_of(said: dict[str, Any]) -> pbtxt.TritonConfig:
    """The written config, which is what was reported."""
    config = pbtxt.read(Path(said["directory"]) / "config.pbtxt")
    assert pbtxt.text(config) == said["config"]
    return config


def parameters(config: pbtxt.TritonConfig) -> dict[str, str]:
    return {key: pbtxt.parameter(config, key) for key in config.parameters}


def test_a_model_that_may_be_joined_and_padded(tmp_path: Path) -> None:
    said = add(toys.save(toys.encoder(), tmp_path), tmp_path / "models", "--name", "toy")
    config = config_of(said)
    assert (config.backend, config.max_batch_size, config.HasField("dynamic_batching")) == ("ortgraph", 32, True)
    assert [(entry.name, list(entry.dims), entry.allow_ragged_batch) for entry in config.input] == [
        ("ids", [-1], True),
        ("mask", [-1], True),
    ]
    assert parameters(config) == {"buckets": "sequence=16,32,64,128,256,512", "value_ranges": "ids=0..49"}
    assert said["decisions"]["joined"].startswith("yes, up to 32 rows")
    assert said["decisions"]["padded"].startswith("sequence to 16, 32, 64, 128, 256 or 512; measured")
    assert said["decisions"]["captured"] == "no: the CPU captures no graphs; nothing in the graph forbids it on a GPU"
    assert said["next"] == f"ortgraph serve -m {tmp_path / 'models'}"
    folder = Path(said["directory"])
    engine = Engine.load(pbtxt.settings(config, folder / "1" / "model.onnx"))
    feed = {"ids": np.array([[3, 4, 5]]), "mask": np.ones((1, 3), np.int64)}
    np.testing.assert_array_equal(
        engine.run(feed)["mean"], real_models.plain(folder / "1" / "model.onnx", feed)["mean"]
    )


def rows_mixed() -> onnx.ModelProto:
    """y = x + the sum over all rows."""
    return toys.reduce("ReduceSum", axis=0)


def first_axis(name: str | None) -> onnx.ModelProto:
    node = helper.make_node("Add", ["x", "x"], ["y"])
    return model([node], [("x", F32, [name, 4])], [("y", F32, [name, 4])])


@pytest.mark.parametrize(
    ("made", "max_batch_size", "ragged", "joined"),
    [
        (toys.reduce("ReduceMean"), 32, False, "yes, up to 32 rows"),
        (rows_mixed(), 0, False, "no, a request at a time: output 'y' of a row changes by"),
        (toys.grid(), 0, False, "no, a request at a time: input 's' is a scalar"),
        (first_axis("N"), 32, False, "yes, up to 32 rows"),
        (first_axis(None), 32, False, "yes, up to 32 rows"),
        (first_axis("sequence_length"), 0, False, "no, a request at a time: the first axis of input 'x' is called"),
        (model([helper.make_node("Neg", ["x"], ["y"])], [("x", F32, ["n"])], [("y", F32, ["n"])]), 0, False,
         "no, a request at a time: every input has a single axis"),
        (model([helper.make_node("Neg", ["x"], ["y"])], [("x", F32, [4, "n"])], [("y", F32, [4, "n"])]), 0, False,
         "no, a request at a time: input 'x' has the fixed size 4 on its first axis"),
        (toys.affine(), 32, True, "yes, up to 32 rows"),
    ],
)  # fmt: skip
def test_joining_and_padding_follow_what_is_proven(
    tmp_path: Path, made: onnx.ModelProto, max_batch_size: int, ragged: bool, joined: str
) -> None:
    said = add(toys.save(made, tmp_path), tmp_path / "models", "--name", "toy")
    config = config_of(said)
    assert config.max_batch_size == max_batch_size
    assert config.HasField("dynamic_batching") is (max_batch_size > 0)
    assert any(entry.allow_ragged_batch for entry in config.input) is ragged
    assert ("buckets" in config.parameters) is ragged
    assert said["decisions"]["joined"].startswith(joined)
    Engine.load(pbtxt.settings(config, Path(said["directory"]) / "1" / "model.onnx")).close()


def test_buckets_end_where_the_model_does(tmp_path: Path) -> None:
    """Positions up to 100: 128 would be refused by the model."""
    nodes = [
        helper.make_node("Shape", ["x"], ["size"], start=1, end=2),
        helper.make_node("Slice", ["positions", "zero", "size", "zero"], ["rows"]),
        helper.make_node("Add", ["x", "rows"], ["y"]),
    ]
    weights = {"positions": np.arange(100, dtype=np.float32), "zero": np.array([0])}
    made = model(nodes, [("x", F32, ["batch", "n"])], [("y", F32, ["batch", "n"])], weights)
    said = add(toys.save(made, tmp_path), tmp_path / "models", "--name", "toy")
    assert parameters(config_of(said)) == {"buckets": "n=16,32,64"}


def test_a_mask_is_taken_for_one_where_that_proves_padding(tmp_path: Path) -> None:
    """A mask of 2 would make this mean another one, and so would padding beside it."""
    nodes = [
        helper.make_node("Cast", ["attention_mask"], ["m"], to=F32),
        helper.make_node("Mul", ["x", "m"], ["kept"]),
        helper.make_node("ReduceSum", ["m", "one"], ["count"], keepdims=1),
        helper.make_node("ReduceMax", ["m", "one"], ["top"], keepdims=1),
        helper.make_node("Sub", ["top", "unit"], ["beyond"]),
        helper.make_node("ReduceMean", ["kept", "one"], ["mean"], keepdims=1),
        helper.make_node("Mul", ["mean", "beyond"], ["wrong"]),
        helper.make_node("ReduceSum", ["kept", "one"], ["sum"], keepdims=1),
        helper.make_node("Add", ["sum", "wrong"], ["y"]),
    ]
    weights = {"one": np.array([1]), "unit": np.array([1], np.float32)}
    inputs = [("x", F32, ["batch", "n"]), ("attention_mask", I64, ["batch", "n"])]
    made = model(nodes, inputs, [("y", F32, ["batch", 1])], weights)
    said = add(toys.save(made, tmp_path), tmp_path / "models", "--name", "toy")
    assert parameters(config_of(said))["value_ranges"] == "attention_mask=0..1"
    assert said["decisions"]["value ranges"] == "attention_mask=0..1, with which padding is proven"
    assert all(entry.allow_ragged_batch for entry in config_of(said).input)


@pytest.mark.parametrize("first", ["batch", 2])
def test_a_weight_that_may_be_overridden_is_optional(tmp_path: Path, first: str | int) -> None:
    """In a batched model it has no rows, so it stays what it is."""
    inputs = [("x", F32, [first, 4]), ("scale", F32, [4])]
    weights = {"scale": np.arange(4, dtype=np.float32)}
    made = model([helper.make_node("Mul", ["x", "scale"], ["y"])], inputs, [("y", F32, [first, 4])], weights)
    said = add(toys.save(made, tmp_path), tmp_path / "models", "--name", "toy")
    entries = [(entry.name, entry.optional) for entry in config_of(said).input]
    assert entries == ([("x", False)] if first == "batch" else [("x", False), ("scale", True)])
    folder = Path(said["directory"])
    engine = Engine.load(pbtxt.settings(config_of(said), folder / "1" / "model.onnx"))
    feed = {"x": np.ones((2, 4), np.float32)}
    np.testing.assert_array_equal(engine.run(feed)["y"], feed["x"] * weights["scale"])


def test_wishes_are_kept(tmp_path: Path) -> None:
    said = add(
        toys.save(toys.encoder(), tmp_path), tmp_path / "models", "--name", "toy", "--max-batch-size", "4",
        "--buckets", "batch=1,4; sequence=8,16", "--value-ranges", "ids=1..9; mask=0..1", "--provider", "cpu",
    )  # fmt: skip
    config = config_of(said)
    assert config.max_batch_size == 4
    assert parameters(config) == {
        "buckets": "batch=1,4; sequence=8,16",
        "value_ranges": "ids=1..9; mask=0..1",
        "execution_provider": "cpu",
    }


def test_values_that_need_a_range_are_said(tmp_path: Path) -> None:
    """magika's bytes: proven only on what bytes are."""
    said = add(real_models.magika(), tmp_path / "models", "--name", "magika")
    assert said["decisions"]["joined"].endswith("say so: --value-ranges 'bytes=LOW..HIGH'")
    said = add(
        real_models.magika(), tmp_path / "models", "--name", "magika", "--force", "--value-ranges", "bytes=0..256"
    )
    assert said["decisions"]["joined"].startswith("yes")


def test_sizes_that_the_model_needs_are_asked_for(tmp_path: Path) -> None:
    """A model of 500 elements a row or none: no size that is tried runs."""
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["cut"]), helper.make_node("Neg", ["cut"], ["y"])]
    made = model(nodes, [("x", F32, ["b", "n"])], [("y", F32, ["b", 500])], {"shape": np.array([-1, 500])})
    file = toys.save(made, tmp_path)
    said = add(file, tmp_path / "models", "--name", "toy")
    assert said["decisions"]["joined"].endswith("; name sizes that the model takes: --buckets 'n=SIZE,SIZE'")
    said = add(file, tmp_path / "models", "--name", "toy", "--force", "--buckets", "n=500")
    assert said["decisions"]["joined"].startswith("yes, up to 32 rows")


@pytest.mark.parametrize(
    ("path", "name"),
    [("some_model.onnx", "some_model"), ("bert/model.onnx", "bert"), ("bert/onnx/model.onnx", "bert"),
     ("repository/bert/1/model.onnx", "bert")],
)  # fmt: skip
def test_the_name_is_the_files_or_its_folders(tmp_path: Path, path: str, name: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(toys.affine(), file)
    assert add(file, tmp_path / "models", "--max-batch-size", "0")["name"] == name


def test_the_summary_says_what_was_decided(tmp_path: Path) -> None:
    file = toys.save(toys.reduce("ReduceMean"), tmp_path)
    done = CliRunner().invoke(app, ["add", str(file), "-m", str(tmp_path / "models"), "--name", "toy"])
    lines = done.stdout.splitlines()
    assert lines[0] == f"toy is in {tmp_path / 'models' / 'toy'}"
    assert [line.split()[0] for line in lines[1:-1]] == ["joined", "padded", "captured"]
    assert "dimension 'n' is never padded: output 'y' changes by" in lines[2]
    assert lines[-1] == f"Next: ortgraph serve -m {tmp_path / 'models'}"
    assert done.stderr == ""


def test_external_data_comes_along(tmp_path: Path) -> None:
    made = toys.encoder()
    made.graph.initializer[0].CopyFrom(
        onnx.numpy_helper.from_array(np.tile(toys.TABLE, (100, 1)), made.graph.initializer[0].name)
    )
    source = tmp_path / "source"
    source.mkdir()
    onnx.save(made, source / "m.onnx", save_as_external_data=True, location="weights.bin")
    said = add(source / "m.onnx", tmp_path / "models")
    shutil.rmtree(source)
    assert sorted(path.name for path in (Path(said["directory"]) / "1").iterdir()) == ["model.onnx", "weights.bin"]
    Engine.load(pbtxt.settings(config_of(said), Path(said["directory"]) / "1" / "model.onnx")).close()


def test_a_model_is_replaced_only_when_told(tmp_path: Path) -> None:
    file, repository = toys.save(toys.affine(), tmp_path), tmp_path / "models"
    add(file, repository, "--name", "toy")
    note = repository / "toy" / "note.txt"
    note.write_text("mine")
    done = CliRunner().invoke(app, ["add", str(file), "-m", str(repository), "--name", "toy"])
    assert one_line(done) == f"{repository / 'toy'} is there already; --force replaces it"
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(b"no model")
    one_line(CliRunner().invoke(app, ["add", str(bad), "-m", str(repository), "--name", "toy", "--force"]))
    assert note.exists()
    add(file, repository, "--name", "toy", "--force")
    assert not note.exists()
    assert sorted(path.name for path in repository.iterdir()) == ["toy"]


def with_external(location: str) -> onnx.ModelProto:
    made = toys.encoder()
    weight = made.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value=location)
    return made


def sequence_output() -> onnx.ModelProto:
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(F32, ["n"]))
    made = toys.affine()
    graph = helper.make_graph(
        [helper.make_node("SequenceConstruct", ["x", "x"], ["y"])],
        "toy",
        [helper.make_tensor_value_info("x", F32, ["n"])],
        [helper.make_value_info("y", kind)],
    )
    return helper.make_model(graph, opset_imports=made.opset_import, ir_version=9)


@pytest.mark.parametrize(
    ("content", "arguments", "said"),
    [
        (b"not a model", (), "is not an ONNX file"),
        (b"", (), "is not an ONNX file"),
        (toys.affine().SerializeToString()[:-40], (), "is not an ONNX file"),
        (None, (), "there is no file"),
        (with_external("gone.bin").SerializeToString(), (), "needs its external data file gone.bin beside it"),
        (with_external("../gone.bin").SerializeToString(), (), "external data outside its folder: ../gone.bin"),
        (with_external("/etc/passwd").SerializeToString(), (), "external data outside its folder: /etc/passwd"),
        (sequence_output().SerializeToString(), (), "'y' is seq(tensor(float)); only tensors"),
        (model([helper.make_node("Add", ["x", "x"], ["y"])], [("x", F32, [1])], [("y", F32, [1])],
               opset_imports=[helper.make_opsetid("", 99)]).SerializeToString(), (), "older opset"),
        (toys.affine().SerializeToString(), ("--buckets", "y=1"), "no dynamic dimension 'y'"),
        (toys.affine().SerializeToString(), ("--buckets", "y"), "--buckets must be"),
        (toys.affine().SerializeToString(), ("--value-ranges", "x=5"), "parameter 'value_ranges' must be"),
        (toys.affine().SerializeToString(), ("--value-ranges", "z=0..5"), "the model has no input 'z'"),
        (toys.affine().SerializeToString(), ("--name", "a/b"), "a model's name is made of letters"),
        (toys.grid().SerializeToString(), ("--max-batch-size", "8"), "set max_batch_size: 0"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_leaves_nothing(
    tmp_path: Path, content: bytes | None, arguments: tuple[str, ...], said: str
) -> None:
    file = tmp_path / "bad.onnx"
    if content is not None:
        file.write_bytes(content)
    assert said in refused(file, tmp_path / "deep" / "models", *arguments)
    assert not (tmp_path / "deep").exists()


def test_a_provider_that_is_none_is_a_usage_error(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["add", str(toys.save(toys.affine(), tmp_path)), "--provider", "gpu"])
    assert done.exit_code == 2


def test_a_folder_without_write_permission(tmp_path: Path) -> None:
    file, closed = toys.save(toys.affine(), tmp_path), tmp_path / "closed"
    closed.mkdir(mode=0o500)
    command = words("add", str(file), "-m", str(closed), "--name", "toy")
    if os.geteuid() == 0:  # root without the right to pass over permissions
        if not shutil.which("setpriv"):
            pytest.skip("root writes anywhere, and there is no setpriv to change that")
        command = ["setpriv", "--inh-caps=-all", "--bounding-set=-dac_override", *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert one_line(done).startswith("no permission to write or read")
    assert list(closed.iterdir()) == []


def test_a_full_disk(tmp_path: Path) -> None:
    """A real one: a file system of 256 KB, and a model that is larger."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small file system can be mounted by root only")
    try:
        command = words("add", str(real_models.path(real_models.CLASSIFICATION)), "-m", str(disk / "models"))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert one_line(done).startswith("the disk is full")
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_ctrl_c_half_way(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    command = words("add", str(real_models.minilm()), "-m", str(repository), "--name", "minilm")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        end = time.monotonic() + 60
        while not any(repository.glob(".minilm-*/new")):
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.01)
        time.sleep(0.5)  # well inside the trials, which take seconds
        process.send_signal(signal.SIGINT)
        said, error = process.communicate(timeout=60)
    assert (process.returncode, said, error) == (130, "", "error: stopped by Ctrl-C; nothing was written\n")
    assert not repository.exists()


def test_buckets_are_few_enough_to_be_captured_all(tmp_path: Path) -> None:
    """Six sizes for each of two dimensions and twenty batch sizes would be over 512 graphs."""
    shape = ["batch", "a", "b"]
    made = model([helper.make_node("Neg", ["x"], ["y"])], [("x", F32, shape)], [("y", F32, shape)])
    said = add(toys.save(made, tmp_path), tmp_path / "models", "--name", "toy", "--max-batch-size", "128")
    ladders = parse_buckets(pbtxt.parameter(config_of(said), "buckets"))
    assert ladders == {"a": (32, 128, 512), "b": (16, 32, 64, 128, 256, 512)}
    assert len(default_batch_ladder(128)) * 36 > MAX_BUCKETS >= len(default_batch_ladder(128)) * 18


@pytest.mark.parametrize(
    ("made", "captured", "buckets"),
    [
        (toys.affine(), "yes, every bucket; each replay was compared with an eager run", "n=16,32,64,128,256,512"),
        (toys.reduce("ReduceMean"),
         "as they are seen, up to 16 exact shapes at a time, since a size has no buckets", ""),
    ],
)  # fmt: skip
def test_on_a_gpu_what_can_be_captured_is(tmp_path: Path, made: onnx.ModelProto, captured: str, buckets: str) -> None:
    if reason := vulkan.why_not():
        pytest.skip(reason)
    said = add(toys.save(made, tmp_path), tmp_path / "models", "--name", "toy", "--provider", "webgpu")
    assert said["decisions"]["captured"] == captured
    assert pbtxt.parameter(config_of(said), "buckets") == buckets
    assert pbtxt.parameter(config_of(said), "execution_provider") == "webgpu"
