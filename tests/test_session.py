"""A model that cannot be loaded says why and how to mend it, in one line."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

from ortgraph import ConfigError, ModelConfig, ModelError
from ortgraph.errors import first_line, nearest
from ortgraph.session import gpu_reason, open_session, session_options
from tests import toys
from tests.toys import F32, I64, model, refused


def load_error(path: Path, **fields: object) -> str:
    with pytest.raises(ModelError) as caught:
        toys.Engine.load(toys.config(path, **fields))
    message = str(caught.value)
    assert "\n" not in message and len(message) < 700
    return message


def relu(opset: int = 18, ir_version: int = 9) -> onnx.ModelProto:
    return model(
        [helper.make_node("Relu", ["x"], ["y"])],
        [("x", F32, ["n"])],
        [("y", F32, ["n"])],
        opset_imports=[helper.make_opsetid("", opset)],
        ir_version=ir_version,
    )


def test_a_missing_file(tmp_path: Path) -> None:
    assert load_error(tmp_path / "1" / "model.onnx") == (
        f"model.onnx is missing in {tmp_path / '1'}; put the ONNX model there"
    )
    assert load_error(tmp_path).endswith("; put the ONNX model there"), "a folder is no model"


@pytest.mark.parametrize("content", [b"no model at all", b"\x08\x09\x12\xff\xff\xff"])
def test_a_file_that_is_no_model(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    message = load_error(path)
    assert message.startswith("ONNX Runtime cannot load model.onnx: ")
    assert message.endswith("; the file is not an ONNX model, or is cut short; copy it again")


def test_a_model_cut_short(tmp_path: Path) -> None:
    whole = toys.encoder().SerializeToString()
    path = tmp_path / "model.onnx"
    path.write_bytes(whole[: len(whole) // 2])
    assert load_error(path).endswith("; the file is not an ONNX model, or is cut short; copy it again")


def test_missing_external_data(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(toys.encoder(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    (tmp_path / "weights.bin").unlink()
    assert load_error(path).endswith("; put the model's external data file beside model.onnx")


def test_a_newer_opset(tmp_path: Path) -> None:
    message = load_error(toys.save(relu(opset=99), tmp_path))
    assert "Opset 99 is under development" in message
    assert message.endswith("; re-export the model with an older opset, or install a newer onnxruntime")


def test_a_newer_ir_version(tmp_path: Path) -> None:
    message = load_error(toys.save(relu(ir_version=99), tmp_path))
    assert "Unsupported model IR version: 99" in message
    assert message.endswith("; re-export the model with an older IR version, or install a newer onnxruntime")


def test_an_unknown_operator(tmp_path: Path) -> None:
    made = model([helper.make_node("Foo", ["x"], ["y"])], [("x", F32, ["n"])], [("y", F32, ["n"])])
    message = load_error(toys.save(made, tmp_path))
    assert "Foo" in message
    assert message.endswith("; the operator needs a custom library or a newer onnxruntime")


def test_an_operator_without_a_kernel(tmp_path: Path) -> None:
    made = model([helper.make_node("Expand", ["x", "n"], ["y"])], [("x", toys.BF16, [1])], [("y", toys.BF16, ["m"])])
    made.graph.initializer.append(onnx.numpy_helper.from_array(np.array([3]), "n"))
    assert load_error(toys.save(made, tmp_path)) == (
        "ONNX Runtime cannot load model.onnx: Could not find an implementation for Expand(13) node with name ''; "
        "re-export with another opset or element type, or install a newer onnxruntime"
    )


def test_a_session_entry_that_onnxruntime_refuses(tmp_path: Path) -> None:
    path = toys.save(relu(), tmp_path)
    with pytest.raises(ConfigError) as caught:
        toys.Engine.load(toys.config(path, session_config={"session." + "x" * 2000: "1"}))
    message = str(caught.value)
    assert message.startswith("parameter 'session.xxx") and "was refused by ONNX Runtime: " in message
    assert "\n" not in message


def test_a_bad_value_of_a_session_entry(tmp_path: Path) -> None:
    message = load_error(toys.save(relu(), tmp_path), session_config={"session.intra_op_thread_affinities": "nonsense"})
    assert message.startswith("ONNX Runtime cannot load model.onnx: ")


def test_capture_cannot_be_required_of_the_cpu(tmp_path: Path) -> None:
    with refused(
        ConfigError, "parameter 'graph_capture' is required, but the CPU captures no graphs; use a GPU or 'auto'"
    ):
        toys.load(relu(), tmp_path, graph_capture="required")


def test_options_reach_onnxruntime(tmp_path: Path) -> None:
    options = session_options(
        toys.config(
            tmp_path,
            graph_level=1,
            intra_op_thread_count=2,
            inter_op_thread_count=3,
            execution_mode=1,
            enable_mem_arena=False,
            enable_mem_pattern=False,
            session_config={"session.intra_op.allow_spinning": "0"},
        )
    )
    assert options.graph_optimization_level == ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (2, 3)
    assert options.execution_mode == ort.ExecutionMode.ORT_PARALLEL
    assert not options.enable_cpu_mem_arena and not options.enable_mem_pattern
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


@pytest.mark.parametrize(("level", "wanted"), [(-1, "BASIC"), (2, "DISABLE"), (0, "ENABLE_ALL"), (None, "ENABLE_ALL")])
def test_graph_levels_are_those_of_tritons_onnxruntime_backend(tmp_path: Path, level: int | None, wanted: str) -> None:
    assert wanted in session_options(toys.config(tmp_path, graph_level=level)).graph_optimization_level.name


def test_options_change_no_answer(tmp_path: Path) -> None:
    x = np.array([-1, 2], np.float32)
    for fields in (
        {"graph_level": 2},
        {"execution_mode": 1},
        {"enable_mem_arena": False},
        {"intra_op_thread_count": 1},
    ):
        assert toys.load(relu(), tmp_path, **fields).run({"x": x})["y"].tolist() == [0, 2]


def test_first_line_is_one_short_line() -> None:
    assert first_line(Exception("[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Got invalid : dims\nstack")) == (
        "Got invalid : dims"
    )
    assert first_line(Exception("\n running node. Status Message:\n it broke\n more")) == (
        "running node. Status Message: it broke"
    )
    assert first_line(ValueError()) == "ValueError"
    assert first_line(Exception("x" * 1000)) == "x" * 397 + "..."


def test_the_place_in_onnxruntimes_sources_is_left_out() -> None:
    text = (
        "[ONNXRuntimeError] : 1 : FAIL : Load model from /m/1/model.onnx failed:"
        "/onnxruntime_src/onnxruntime/core/x.h:46 void onnxruntime::f(const std::map<std::string, int>&, "
        "std::function<void(int)>, bool) const It is so"
    )
    assert first_line(Exception(text)) == "It is so"
    text = (
        "while running Expand node. Status Message: "
        "/onnxruntime_src/a/b.cc:7 T a::B<T>::C(int) [with T = x] a == b was false. No"
    )
    assert first_line(Exception(text)) == "while running Expand node. Status Message: a == b was false. No"


def test_a_full_arena_says_what_to_change(tmp_path: Path) -> None:
    """In ONNX Runtime's own words: those of an arena with a limit, and of the device (here the host) itself."""
    made = model([helper.make_node("Expand", ["x", "shape"], ["y"])], [("x", F32, [1]), ("shape", I64, [1])],
                      [("y", F32, None)])  # fmt: skip
    config = toys.config(toys.save(made, tmp_path), provider_options={"gpu_mem_limit": "1048576"})
    memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(memory, ort.OrtArenaCfg(1 << 20, 1, 4096, -1))
    options = session_options(replace(config, session_config={"session.use_env_allocators": "1"}))

    def reason(session: ort.InferenceSession, config: ModelConfig) -> str:
        with pytest.raises(Exception, match="memory") as caught:
            session.run(None, {"x": np.ones(1, np.float32), "shape": np.array([1 << 44])})
        return gpu_reason(caught.value, config)

    limited = open_session(config, options, ["CPUExecutionProvider"])
    assert re.fullmatch(
        r".* Available memory of \d+ is smaller than requested bytes of 70368744177664; "
        "raise the parameter gpu_mem_limit, now 1048576 bytes",
        reason(limited, config),
    )
    assert reason(limited, replace(config, provider_options={})).endswith("70368744177664")
    free = open_session(config, session_options(config), ["CPUExecutionProvider"])
    assert reason(free, config).endswith("buffer of size 70368744177664; the GPU's memory is full")


def test_nearest() -> None:
    assert nearest("mask", ["maks", "ids"]) == "; did you mean 'maks'?"
    assert nearest("zzz", ["b", "a"]) == "; known: a, b"
    assert nearest("zzz", []) == ""
