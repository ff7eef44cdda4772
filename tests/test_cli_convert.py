"""`ortgraph convert`: every setting of Triton's onnxruntime backend is kept, renamed or named as not applicable."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper
from typer.testing import CliRunner

from ortgraph import Engine
from ortgraph.cli import app, pbtxt
from ortgraph.graph_spec import GraphSpec
from tests import toys
from tests.toys import F32, model

IO = """
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""


def write(folder: Path, config: str | None, made: onnx.ModelProto | None = None, file: str = "1/model.onnx") -> Path:
    path = folder / file
    path.parent.mkdir(parents=True)
    onnx.save(made or toys.affine(), path)
    if config is not None:
        (folder / "config.pbtxt").write_text(config)
    return folder


def invoke(source: Path, target: Path, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["convert", str(source), str(target), *arguments])


def convert(source: Path, target: Path, *arguments: str) -> dict[str, Any]:
    done = invoke(source, target, "--json", *arguments)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["config"] == pbtxt.text(pbtxt.read(target / "config.pbtxt"))
    return found


def parameters(target: Path) -> dict[str, str]:
    config = pbtxt.read(target / "config.pbtxt")
    return {key: pbtxt.parameter(config, key) for key in config.parameters}


def entry(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n'


@pytest.mark.parametrize(
    ("setting", "kept"),
    [
        (entry("intra_op_thread_count", "2"), "parameter intra_op_thread_count"),
        (entry("inter_op_thread_count", "1"), "parameter inter_op_thread_count"),
        (entry("execution_mode", "1"), "parameter execution_mode"),
        (entry("enable_mem_arena", "0"), "parameter enable_mem_arena"),
        (entry("enable_mem_pattern", "0"), "parameter enable_mem_pattern"),
        (entry("gpu_mem_limit", "18446744073709551615"), "parameter gpu_mem_limit"),
        (entry("session.use_device_allocator_for_initializers", "1"),
         "parameter session.use_device_allocator_for_initializers"),
        ("optimization { graph { level: -1 } }", "optimization.graph"),
        ("optimization { eager_batching: true }", "optimization.eager_batching"),
        ("version_policy { all { } }", "version_policy"),
        ("instance_group [ { count: 2 kind: KIND_CPU } ]", "instance_group"),
        ("dynamic_batching { max_queue_delay_microseconds: 9 }", "dynamic_batching"),
        ("response_cache { enable: true }", "response_cache"),
        ('metric_tags { key: "a" value: "b" }', "metric_tags"),
        ('model_warmup [ { name: "w" batch_size: 1 inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 2 ] '
         "zero_data: true } } } ]", "model_warmup"),
    ],
)  # fmt: skip
def test_what_both_know_is_kept(tmp_path: Path, setting: str, kept: str) -> None:
    source = write(tmp_path / "theirs", f'platform: "onnxruntime_onnx" max_batch_size: 4 {IO} {setting}')
    said = convert(source, tmp_path / "ours")
    assert said["kept"] == [name for name in said["kept"] if name in {"max_batch_size", "input", "output", kept}]
    assert kept in said["kept"]
    assert (said["changed"], said["not_applicable"]) == ([], [])
    before, after = (pbtxt.read(folder / "config.pbtxt") for folder in (source, tmp_path / "ours"))
    before.platform, before.backend = "", "ortgraph"
    assert after == before


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        (entry("memory.enable_memory_arena_shrinkage", "cpu:0"), "parameter memory.enable_memory_arena_shrinkage"),
        (entry("do_copy_in_default_stream", "1"), "parameter do_copy_in_default_stream"),
        (entry("owner", "me"), "parameter owner"),
        ("optimization { priority: PRIORITY_MAX }", "optimization.priority"),
        ("optimization { input_pinned_memory { enable: false } }", "optimization.input_pinned_memory"),
        ("optimization { output_pinned_memory { enable: true } }", "optimization.output_pinned_memory"),
        ("optimization { gather_kernel_buffer_threshold: 1 }", "optimization.gather_kernel_buffer_threshold"),
        ("optimization { cuda { graphs: true } }", "optimization.cuda.graphs"),
        ("optimization { cuda { output_copy_stream: true } }", "optimization.cuda.output_copy_stream"),
        ('optimization { execution_accelerators { gpu_execution_accelerator: [ { name: "tensorrt" } ] } }',
         "gpu_execution_accelerator tensorrt"),
        ('optimization { execution_accelerators { cpu_execution_accelerator: [ { name: "openvino" } ] } }',
         "cpu_execution_accelerator openvino"),
        ('optimization { execution_accelerators { gpu_execution_accelerator: [ { name: "cuda" parameters { '
         'key: "use_ep_level_unified_stream" value: "1" } } ] } }',
         "gpu_execution_accelerator cuda: use_ep_level_unified_stream"),
        ('cc_model_filenames { key: "7.5" value: "model.onnx" }', "cc_model_filenames"),
        ('runtime: "libtriton_onnxruntime.so"', 'runtime "libtriton_onnxruntime.so"'),
    ],
)  # fmt: skip
def test_what_is_not_applicable_is_named_and_gone(tmp_path: Path, setting: str, named: str) -> None:
    source = write(tmp_path / "theirs", f'backend: "onnxruntime" max_batch_size: 4 {IO} {setting}')
    said = convert(source, tmp_path / "ours")
    (line,) = said["not_applicable"]
    assert line.startswith(f"{named}: ")
    after = pbtxt.read(tmp_path / "ours" / "config.pbtxt")
    assert {field.name for field, _ in after.ListFields()} == {"backend", "max_batch_size", "input", "output"}


def test_cuda_options_get_onnxruntimes_names_and_back(tmp_path: Path) -> None:
    """As an accelerator's they would ask for CUDA also where there is no GPU, unlike in the onnxruntime backend."""
    accelerator = 'name: "cuda" parameters { key: "gpu_mem_limit" value: "99" }'
    optimization = f"optimization {{ execution_accelerators {{ gpu_execution_accelerator: [ {{ {accelerator} }} ] }} }}"
    numbers = entry("cudnn_conv_algo_search", "2") + entry("arena_extend_strategy", "1")
    source = write(tmp_path / "theirs", f'backend: "onnxruntime" {optimization} {numbers}')
    said = convert(source, tmp_path / "ours")
    named = {"cudnn_conv_algo_search": "DEFAULT", "arena_extend_strategy": "kSameAsRequested", "gpu_mem_limit": "99"}
    assert parameters(tmp_path / "ours") == named
    assert len(said["changed"]) == 3
    convert(tmp_path / "ours", tmp_path / "back", "--to", "onnxruntime")
    assert parameters(tmp_path / "back") == {
        "cudnn_conv_algo_search": "2",
        "arena_extend_strategy": "1",
        "gpu_mem_limit": "99",
    }


def test_a_setting_that_only_now_counts_is_said(tmp_path: Path) -> None:
    source = write(tmp_path / "theirs", 'backend: "onnxruntime"' + entry("session.set_denormal_as_zero", "1"))
    said = convert(source, tmp_path / "ours")
    assert said["changed"] == [
        "parameter session.set_denormal_as_zero: the onnxruntime backend did not read it, and it counts now"
    ]


def test_graph_specs_and_waiting_by_spinning_count_from_now_on(tmp_path: Path) -> None:
    spec = 'graph_spec [ { batch_size: 2 input { key: "x" value { dim: [ 8 ] } } } ]'
    cuda = f"optimization {{ cuda {{ busy_wait_events: true {spec} }} }}"
    source = write(tmp_path / "theirs", f'backend: "onnxruntime" max_batch_size: 4 {IO} {cuda}')
    said = convert(source, tmp_path / "ours")
    why = "the onnxruntime backend did not read it, and it counts now"
    assert said["changed"] == [f"optimization.cuda.busy_wait_events: {why}", f"optimization.cuda.graph_spec: {why}"]
    assert said["not_applicable"] == []
    config = pbtxt.settings(pbtxt.read(tmp_path / "ours" / "config.pbtxt"), tmp_path / "ours" / "1" / "model.onnx")
    assert config.busy_wait_events
    assert config.graph_specs == (GraphSpec(2, {"x": (8,)}),)
    said = convert(tmp_path / "ours", tmp_path / "back", "--to", "onnxruntime")
    assert [line.split(": ")[0] for line in said["not_applicable"]] == [
        "optimization.cuda.busy_wait_events",
        "optimization.cuda.graph_spec",
    ]
    assert not pbtxt.read(tmp_path / "back" / "config.pbtxt").HasField("optimization")


def test_rows_that_change_each_other_are_no_longer_joined(tmp_path: Path) -> None:
    source = write(
        tmp_path / "theirs", f'backend: "onnxruntime" max_batch_size: 4 {IO}', toys.reduce("ReduceSum", axis=0)
    )
    (line,) = convert(source, tmp_path / "ours")["changed"]
    assert line.startswith("version 1: requests are no longer joined, since it changes answers: output 'y' of a row")
    (line,) = convert(tmp_path / "ours", tmp_path / "back", "--to", "onnxruntime")["changed"]
    assert line.startswith("version 1: requests are joined there all the same, although it changes answers: output 'y'")


def test_every_file_and_version_comes_along(tmp_path: Path) -> None:
    source = write(tmp_path / "theirs", 'name: "theirs" backend: "onnxruntime"', file="1/model.onnx")
    onnx.save(toys.affine(), write(source / "more", None, file="x/x.onnx") / "x" / "x.onnx")
    (source / "12").mkdir()
    onnx.save(toys.affine(), source / "12" / "model.onnx")
    (source / "labels.txt").write_text("cat\n")
    said = convert(source, tmp_path / "models" / "ours")
    target = tmp_path / "models" / "ours"
    assert said["versions"] == [1, 12]
    assert pbtxt.read(target / "config.pbtxt").name == "ours"
    files = sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
    assert files == ["1/model.onnx", "12/model.onnx", "config.pbtxt", "labels.txt", "more/x/x.onnx"]
    assert (source / "config.pbtxt").read_text() == 'name: "theirs" backend: "onnxruntime"'


@pytest.mark.parametrize(
    ("setting", "file"),
    [('default_model_filename: "net.bin"', "1/net.bin"), ('default_model_filename: "net"', "1/net/model.onnx"),
     ("", "1/model.onnx/model.onnx")],
)  # fmt: skip
def test_a_model_file_of_another_name_or_in_a_folder(tmp_path: Path, setting: str, file: str) -> None:
    source = write(tmp_path / "theirs", f'backend: "onnxruntime" {setting}', file=file)
    said = convert(source, tmp_path / "ours")
    assert said["changed"][0].endswith("is now model.onnx")
    config = pbtxt.read(tmp_path / "ours" / "config.pbtxt")
    assert config.default_model_filename == ""
    Engine.load(pbtxt.settings(config, tmp_path / "ours" / "1" / "model.onnx")).close()


def test_a_directory_without_a_config_and_one_replaced_in_place(tmp_path: Path) -> None:
    source = write(tmp_path / "bert", None)
    done = invoke(source, source)
    assert done.exit_code == 1
    assert done.stderr == f"error: {source} is there already; --force replaces it\n"
    convert(source, source, "--force")
    assert (source / "config.pbtxt").read_text() == 'backend: "ortgraph"\n'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bert"]


def test_an_output_with_a_reshape_gets_the_models_dims(tmp_path: Path) -> None:
    made = model([helper.make_node("Neg", ["x"], ["y"])], [("x", F32, ["b", 4])], [("y", F32, ["b", 4])])
    config = """backend: "onnxruntime" max_batch_size: 4
        input [ { name: "x" data_type: TYPE_FP32 dims: [ 2, 2 ] reshape { shape: [ 4 ] } } ]
        output [ { name: "y" data_type: TYPE_FP32 dims: [ 2, 2 ] reshape { shape: [ 4 ] } } ]"""
    said = convert(write(tmp_path / "theirs", config, made), tmp_path / "ours")
    assert said["not_applicable"] == ["output y: reshape: clients get [4] instead of [2, 2] (after the batch)"]
    after = pbtxt.read(tmp_path / "ours" / "config.pbtxt")
    assert list(after.output[0].dims) == [4]
    assert list(after.input[0].reshape.shape) == [4]


def test_going_back_names_what_is_lost(tmp_path: Path) -> None:
    ours = """backend: "python" max_batch_size: 4
        input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true } ]
        output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] } ]
        optimization { cuda { busy_wait_events: true } graph { level: 1 } }"""
    ours += entry("buckets", "n=2,4") + entry("execution_provider", "cpu") + entry("intra_op_thread_count", "1")
    source = write(tmp_path / "ours", ours)
    (source / "1" / "model.py").write_text('from ortgraph.backend import TritonPythonModel\n\n__all__ = ["x"]\n')
    said = convert(source, tmp_path / "theirs", "--to", "onnxruntime")
    config = pbtxt.read(tmp_path / "theirs" / "config.pbtxt")
    assert (config.backend, config.optimization.graph.level) == ("onnxruntime", 1)
    assert [group.Kind.Name(group.kind) for group in config.instance_group] == ["KIND_CPU"]
    assert parameters(tmp_path / "theirs") == {"intra_op_thread_count": "1"}
    assert sorted(path.name for path in (tmp_path / "theirs" / "1").iterdir()) == ["model.onnx"]
    assert [line.split(": ")[0] for line in said["not_applicable"]] == [
        "input x",
        "parameter buckets",
        "optimization.cuda.busy_wait_events",
    ]
    assert said["changed"] == ["parameter execution_provider: cpu is now instance_group kind KIND_CPU"]


@pytest.mark.parametrize(
    ("config", "arguments", "said"),
    [
        ('backend: "tensorflow"', (), "the model's backend is 'tensorflow', not onnxruntime"),
        ('platform: "tensorrt_plan"', (), "the model's backend is 'tensorrt_plan', not onnxruntime"),
        ('backend: "ortgraph"', (), "to go back, give --to onnxruntime"),
        ('backend: "onnxruntime"', ("--to", "onnxruntime"), "the model's backend is 'onnxruntime', not ortgraph"),
        ('backend: "onnxruntime" sequence_batching { }', (), "config.pbtxt uses sequence_batching"),
        ('backend: "onnxruntime" batch_input [ { kind: BATCH_ELEMENT_COUNT } ]', (), "uses batch_input"),
        ('backend: "onnxruntime" model_operations { op_library_filename: "a.so" }', (), "op_library_filename"),
        (f'backend: "onnxruntime" max_batch_size: 4 {IO.replace("dims: [ -1 ]", "dims: [ 3, 3 ]")}', (),
         "input 'x': dims are [3, 3], the model has [-1]"),
        ('backend: "onnxruntime" input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true } ]',
         (), "input 'x' has allow_ragged_batch"),
        ('backend: "onnxruntime" default_model_filename: "gone.onnx"', (), "there is no file"),
        ("backend: [", (), "is not a config.pbtxt: 1:10"),
        ('backend: "onnxruntime" colour: 3', (), 'no field named "colour"'),
        ('backend: "onnxruntime"' + entry("execution_mode", "7"), (), "parameter 'execution_mode' must be"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_leaves_nothing(
    tmp_path: Path, config: str, arguments: tuple[str, ...], said: str
) -> None:
    source = write(tmp_path / "theirs", config)
    done = invoke(source, tmp_path / "new" / "ours", *arguments)
    assert done.exit_code == 1
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert said in done.stderr
    assert not (tmp_path / "new").exists()


def test_a_new_directory_inside_the_old_one(tmp_path: Path) -> None:
    source = write(tmp_path / "theirs", 'backend: "onnxruntime"')
    done = invoke(source, source / "ours")
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert "name a folder beside it" in done.stderr
    assert sorted(path.name for path in source.iterdir()) == ["1", "config.pbtxt"]


def test_what_is_no_model_directory(tmp_path: Path) -> None:
    done = invoke(tmp_path / "gone", tmp_path / "ours")
    assert (done.exit_code, done.stderr) == (1, f"error: there is no model directory {tmp_path / 'gone'}\n")
    (tmp_path / "empty").mkdir()
    done = invoke(tmp_path / "empty", tmp_path / "ours")
    assert done.exit_code == 1
    assert done.stderr.endswith("it has no version folder such as 1/\n")


def test_a_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    source = write(tmp_path / "theirs", 'backend: "onnxruntime"')
    (source / "large.txt").write_bytes(bytes(1 << 20))
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small file system can be mounted by root only")
    try:
        done = invoke(source, disk / "new" / "ours")
        assert done.exit_code == 1
        assert done.stderr.startswith("error: the disk is full") and done.stderr.count("\n") == 1
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)
