"""`ortgraph optimize` on real models; answers are compared with plain ONNX Runtime."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import toys
import wheels
from onnx import TensorProto, helper
from typer.testing import CliRunner

from models.encoder import EncoderSpec, build
from ortgraph.cli import app, files

ENCODER = EncoderSpec(layers=2, hidden=96, heads=3, intermediate=192, vocab=500, fused=False, normalise=True)
ENCODER_OPTIONS = ("--sizes", "batch=12; sequence=24", "--value-ranges", "input_ids=0..499")


def optimize(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["optimize", *map(str, arguments)])


def optimized(source: Path, target: Path, *arguments: str) -> dict[str, Any]:
    """The report; the command must succeed and say nothing on standard error."""
    done = optimize(source, "-o", target, "--json", *arguments)
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def refused(target: Path, *arguments: str | Path, code: int = 1) -> str:
    """The one line of a command that fails and leaves nothing in the target's folder that was not there."""
    before = sorted(target.parent.iterdir()) if target.parent.is_dir() else []
    done = optimize(*arguments, "-o", target)
    assert done.exit_code == code, done.output
    assert done.stdout == ""
    assert (sorted(target.parent.iterdir()) if target.parent.is_dir() else []) == before
    lines = done.stderr.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def run(path: Path, inputs: dict[str, Any]) -> list[Any]:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return [np.asarray(array, np.float32) for array in session.run(None, inputs)]


def operators(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(str(path)).graph.node]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of plain operators, with weights wide enough that attention and mask matter."""
    model = build(ENCODER, seed=4)
    for tensor in model.graph.initializer:
        if tensor.dims and len(tensor.dims) == 2:
            tensor.raw_data = (np.frombuffer(tensor.raw_data, np.float32) * 8).tobytes()
    path = tmp_path_factory.mktemp("encoder") / "model.onnx"
    onnx.save(model, str(path))
    return path


def ragged() -> dict[str, Any]:
    """Rows of different lengths, and a mask with holes."""
    random = np.random.default_rng(1)
    mask = (np.arange(20) < np.array([20, 3, 11, 7])[:, None]).astype(np.int64)
    mask[2, 4:6] = 0
    return {"input_ids": random.integers(0, ENCODER.vocab, mask.shape), "attention_mask": mask}


def test_an_encoder_is_fused_and_its_answers_stay(encoder: Path, tmp_path: Path):
    report = optimized(encoder, tmp_path / "out.onnx", *ENCODER_OPTIONS)
    assert report["fused"] == {
        "com.microsoft.Attention": 2,
        "com.microsoft.BiasGelu": 2,
        "com.microsoft.SkipLayerNormalization": 4,
    }
    assert report["after"]["nodes"] < report["before"]["nodes"] / 2
    assert report["after"]["size_bytes"] == (tmp_path / "out.onnx").stat().st_size
    assert report["outputs"][0]["worst"] < 1e-4 and report["outputs"][0]["same_nearest"] == 1
    assert "Erf" not in operators(tmp_path / "out.onnx") and "Softmax" not in operators(tmp_path / "out.onnx")
    assert {opset.domain for opset in onnx.load(str(tmp_path / "out.onnx")).opset_import} == {"", "com.microsoft"}
    (wanted,), (got,) = run(encoder, ragged()), run(tmp_path / "out.onnx", ragged())
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    assert np.ptp(wanted, axis=0).max() > 0.1  # the rows differ, so that a lost mask would show


@pytest.mark.parametrize("keep", [True, False])
def test_half_precision(encoder: Path, tmp_path: Path, keep: bool):
    options = ("--fp16", *(["--keep-io-types"] if keep else []))
    report = optimized(encoder, tmp_path / "half.onnx", *ENCODER_OPTIONS, *options)
    assert report["fused"]["com.microsoft.Attention"] == 2
    assert report["after"]["size_bytes"] < 0.6 * report["before"]["size_bytes"]
    model = onnx.load(str(tmp_path / "half.onnx"))
    assert (model.graph.output[0].type.tensor_type.elem_type == TensorProto.FLOAT) is keep
    (wanted,), (got,) = run(encoder, ragged()), run(tmp_path / "half.onnx", ragged())
    error = np.abs(got - wanted).max() / np.abs(wanted).max()
    assert 0 < error < 2e-2
    assert 0 < report["outputs"][0]["worst"] < 2e-2


def test_what_half_precision_loses_is_refused(encoder: Path, tmp_path: Path):
    line = refused(tmp_path / "half.onnx", encoder, *ENCODER_OPTIONS, "--fp16", "--tolerance", "0.0001")
    assert line.startswith("error: output 'embedding' lies ")
    assert line.endswith("from the original's, above the tolerance of 0.0001; nothing was written")


def test_voice_activity_of_opset_18_loses_its_branch_with_the_rate(tmp_path: Path):
    source, target = wheels.voice_activity_18(), tmp_path / "vad.onnx"
    optimized(source, target, "--freeze", "sr=16000", "--sizes", "batch=2; sequence=576")
    assert not {"If", "Loop", "Scan"} & set(operators(target))
    random = np.random.default_rng(0)
    inputs = {"input": random.uniform(-1, 1, (3, 576)).astype(np.float32)}
    inputs["state"] = random.standard_normal((2, 3, 128)).astype(np.float32)
    wanted, got = run(source, {**inputs, "sr": np.array(16000)}), run(target, inputs)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_voice_activity_says_what_still_branches_and_is_free_of_it_with_fixed_sizes(tmp_path: Path):
    source, target = wheels.voice_activity(), tmp_path / "vad.onnx"
    report = optimized(source, target, "--freeze", "sr=16000", "--sizes", "input[0]=1; input[1]=576; state[1]=1")
    (note,) = report["notes"]
    assert note.startswith("If 'If_0/If_0_then_branch__Inline_0__/decoder/If' (and 4 more) remains: it depends on the ")
    assert note.endswith("sizes of 'input'; --freeze 'input[0]=SIZE' --freeze 'input[1]=SIZE' may remove it")
    fixed = tmp_path / "fixed.onnx"
    freeze = [word for text in ("sr=16000", "input[0]=1", "input[1]=576", "state[1]=1") for word in ("--freeze", text)]
    assert optimized(source, fixed, *freeze)["notes"] == []
    assert not {"If", "Loop", "Scan"} & set(operators(fixed))
    random = np.random.default_rng(0)
    state = np.zeros((2, 1, 128), np.float32)
    for _ in range(3):
        inputs = {"input": random.uniform(-1, 1, (1, 576)).astype(np.float32), "state": state}
        wanted = run(source, {**inputs, "sr": np.array(16000)})
        for path in (target, fixed):
            for a, b in zip(run(path, inputs), wanted, strict=True):
                np.testing.assert_allclose(a, b, atol=1e-6)
        state = wanted[1]


def branching() -> onnx.ModelProto:
    """Two Ifs on `flag` whose branches use the same names, read what is around them, and hold another If."""

    def output(name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, None)

    def branch(kind: str, nodes: list[onnx.NodeProto], result: str, weight: float) -> onnx.GraphProto:
        tensor = helper.make_tensor("w", TensorProto.FLOAT, [], [weight])
        return helper.make_graph(nodes, kind, [], [output(result)], [tensor])

    def nodes(name: str, source: str, result: str, weight: float) -> onnx.NodeProto:
        inner = [
            branch(kind, [helper.make_node(op, ["m", "v"], ["r"])], "r", 1.0)
            for kind, op in (("then", "Add"), ("else", "Sub"))
        ]
        # The inner branches read "m" and "v" of the branch around them; their own "w" is another one.
        taken = [
            helper.make_node("Mul", [source, "w"], ["m"]),
            helper.make_node("Identity", ["w"], ["v"]),
            helper.make_node("If", ["inner"], ["c"], then_branch=inner[0], else_branch=inner[1]),
        ]
        branches = (
            branch("then", taken, "c", weight),
            branch("else", [helper.make_node("Neg", [source], ["c"])], "c", 9.0),
        )
        return helper.make_node("If", ["flag"], [result], name=name, then_branch=branches[0], else_branch=branches[1])

    graph = [nodes("first", "x", "a", 3.0), nodes("second", "a", "y", 5.0)]
    inputs = [("x", toys.F32, ["n"]), ("flag", toys.BOOL, []), ("inner", toys.BOOL, [])]
    return toys.model(graph, inputs, [("y", toys.F32, ["n"])])


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_branches_that_share_names_are_folded(tmp_path: Path, flag: bool, inner: bool):
    source, target = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(branching(), str(source))
    x = np.arange(4, dtype=np.float32)
    values = {"flag": np.array(flag), "inner": np.array(inner)}
    (wanted,) = run(source, {"x": x, **values})
    optimized(source, target, "--freeze", f"flag={flag}", "--freeze", f"inner={int(inner)}")
    assert "If" not in operators(target)
    np.testing.assert_array_equal(run(target, {"x": x})[0], wanted)
    report = optimized(source, tmp_path / "some.onnx", "--freeze", f"flag={flag}")
    assert report["notes"] == (
        ["If 'first/c' (and 1 more) remains: it depends on the values of 'inner'"] if flag else []
    )
    np.testing.assert_array_equal(run(tmp_path / "some.onnx", {"x": x, "inner": values["inner"]})[0], wanted)


def test_detection_recognition_and_file_type(tmp_path: Path):
    cases = (
        (wheels.text_detection(), ("--sizes", "x[0]=1; x[2]=64; x[3]=96"), {"x": (1, 3, 64, 96)}),
        (wheels.file_type(), ("--value-ranges", "bytes=0..256", "--sizes", "bytes[0]=2"), {"bytes": (2, 2048)}),
    )
    for source, options, shapes in cases:
        report = optimized(source, tmp_path / source.name, *options)
        assert report["after"]["nodes"] < report["before"]["nodes"]
        assert report["outputs"][0]["worst"] < 1e-3
        random = np.random.default_rng(0)
        inputs: dict[str, Any] = {
            name: random.standard_normal(shape).astype(np.float32)
            if name == "x"
            else random.integers(0, 257, shape, np.int32)
            for name, shape in shapes.items()
        }
        np.testing.assert_allclose(run(tmp_path / source.name, inputs)[0], run(source, inputs)[0], atol=1e-5)


def test_real_inputs_from_a_file_and_the_models_metadata_stay(tmp_path: Path):
    source, target = wheels.recognition(), tmp_path / "rec.onnx"
    pixels = np.random.default_rng(0).standard_normal((1, 3, 48, 96)).astype(np.float32)
    np.savez(tmp_path / "a.npz", x=pixels)
    np.savez(tmp_path / "b.npz", x=pixels[..., :64])
    report = optimized(source, target, "--inputs", str(tmp_path / "a.npz"), "--inputs", str(tmp_path / "b.npz"))
    assert report["runs"] == 2 and report["notes"] == []
    assert report["fused"]["com.microsoft.SkipLayerNormalization"] == 4
    before, after = (onnx.load(str(path)) for path in (source, target))
    assert list(after.metadata_props) == list(before.metadata_props)
    assert [tensor.name for tensor in after.graph.input] == ["x"]


def test_a_model_too_large_for_one_file_gets_external_data(encoder: Path, tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(files, "ONE_FILE_BYTES", 100_000)
    report = optimized(encoder, tmp_path / "large.onnx", *ENCODER_OPTIONS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large.onnx", "large.onnx.data"]
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert report["after"]["size_bytes"] == sum(sizes) and min(sizes) < 50_000 < max(sizes)
    np.testing.assert_allclose(run(tmp_path / "large.onnx", ragged())[0], run(encoder, ragged())[0], atol=1e-5)
    again = optimized(tmp_path / "large.onnx", tmp_path / "half.onnx", *ENCODER_OPTIONS, "--fp16")
    assert again["before"]["size_bytes"] == sum(sizes)


def test_the_example_of_the_help_and_a_table(encoder: Path, tmp_path: Path):
    assert "Example: ortgraph optimize" in optimize("--help").stdout
    done = optimize(encoder, "-o", tmp_path / "out.onnx")
    assert done.exit_code == 0 and "fused operators: 2 Attention, 2 BiasGelu" in done.stdout
    assert "note: input_ids, attention_mask: drawn from 0 and 1; --value-ranges or --inputs" in done.stdout
    assert "out.onnx is there already; --force replaces it" in refused(tmp_path / "out.onnx", encoder)
    assert optimize(encoder, "-o", tmp_path / "out.onnx", "--force").exit_code == 0


# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--freeze", "rate=16000"), "error: --freeze: the model has no input or dimension 'rate'; did you mean "),
        (("--freeze", "sr=fast"), "error: --freeze sr: int64 takes a whole number, got 'fast'"),
        (("--freeze", "sr=9223372036854775808"), "error: --freeze sr: int64 takes a whole number, got '92233720"),
        (("--freeze", "sr"), "error: --freeze must be NAME=VALUE, INPUT[AXIS]=SIZE or DIMENSION=SIZE, got 'sr'"),
        (
            ("--freeze", "input=1"),
            "error: --freeze input: only an input of fixed sizes can be frozen, this has [",
        ),
        (("--freeze", "state[0]=3"), "error: --freeze state[0]=3: that axis has the size 2 in the model"),
        (("--freeze", "batch=0"), "error: --freeze batch: a size is a whole number from 1, got '0'"),
        (("--freeze", "sr=16000", "--freeze", "sequence=3"), "error: the model runs on no generated input ("),
        (
            ("--value-ranges", "srr=0..1"),
            "error: --value-ranges: 'srr' is not an input of the model; did you mean 'sr",
        ),
        (("--value-ranges", "sr=1"), "error: --value-ranges must be 'input=low..high; "),
        (("--sizes", "batch"), "error: --sizes must be 'name=size,size; "),
        (("--sizes", "rows=3"), "error: --sizes: the model has no dynamic dimension 'rows'"),
        (("--inputs", "missing.npz"), "error: "),
    ],
)
def test_a_bad_option_is_one_line(tmp_path: Path, options: tuple[str, ...], message: str):
    assert refused(tmp_path / "out.onnx", wheels.voice_activity_18(), *options).startswith(message)


def test_bad_inputs_are_named(encoder: Path, tmp_path: Path):
    good = ragged()
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "few": ({"input_ids": good["input_ids"]}, "has no array for input 'attention_mask'"),
        "name": ({**good, "mask": good["input_ids"]}, "'mask' is not an input of the model"),
        "type": ({**good, "input_ids": good["input_ids"] / 2}, "input 'input_ids' expects INT64, got float64"),
        "ids": ({**good, "input_ids": good["input_ids"] + 9999}, "the model does not run on these inputs: "),
    }
    folder = tmp_path / "out"
    folder.mkdir()
    for name, (arrays, message) in cases.items():
        np.savez(tmp_path / f"{name}.npz", **arrays)
        assert message in refused(folder / "out.onnx", encoder, "--inputs", tmp_path / f"{name}.npz")
    (tmp_path / "text.npz").write_text("no numbers")
    assert "text.npz is not an .npz file" in refused(folder / "out.onnx", encoder, "--inputs", tmp_path / "text.npz")


def test_bad_models_are_one_line(encoder: Path, tmp_path: Path, monkeypatch: Any):
    folder = tmp_path / "out"
    folder.mkdir()
    text = tmp_path / "text.onnx"
    text.write_text("This is not a model.")
    assert refused(folder / "out.onnx", text).endswith("text.onnx is not an ONNX file")
    assert refused(folder / "out.onnx", tmp_path / "none.onnx").startswith("error: there is no file ")
    newer = build(replace(ENCODER, layers=1), seed=0)
    newer.opset_import[0].version = 99
    onnx.save(newer, str(tmp_path / "newer.onnx"))
    assert "re-export the model with an older opset" in refused(folder / "out.onnx", tmp_path / "newer.onnx")
    onnx.save(build(ENCODER, 0), str(tmp_path / "part.onnx"), save_as_external_data=True, location="part.data")
    (tmp_path / "part.data").unlink()
    assert refused(folder / "out.onnx", tmp_path / "part.onnx").endswith("external data file part.data beside it")
    custom = helper.make_model(
        helper.make_graph(
            [helper.make_node("Fancy", ["x"], ["y"], domain="custom")],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
        ),
        opset_imports=[helper.make_opsetid("custom", 1)],
        ir_version=8,
    )
    onnx.save(custom, str(tmp_path / "custom.onnx"))
    assert "the operator needs a custom library" in refused(folder / "out.onnx", tmp_path / "custom.onnx")


def command(*arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "ortgraph", "optimize", *map(str, arguments)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def test_an_option_without_its_other_is_a_usage_error(encoder: Path, tmp_path: Path):
    done = optimize(encoder, "-o", tmp_path / "out.onnx", "--keep-io-types")
    assert (done.exit_code, done.stdout) == (2, "") and "goes with --fp16" in done.stderr


def test_no_permission_to_write(encoder: Path):
    assert refused(Path("/proc/ortgraph/out.onnx"), encoder).startswith("error: ")
    assert "no permission" in refused(Path("/sys/out.onnx"), encoder) or os.access("/sys", os.W_OK)


def test_a_disk_that_takes_no_more(encoder: Path, tmp_path: Path):
    """A limit on the size of files is what a full disk is to the writer: a write that fails half way."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    with command(encoder, "-o", tmp_path / "out.onnx", preexec_fn=limit) as process:
        stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (1, "")
    assert stderr.startswith("error: ") and len(stderr.splitlines()) == 1, stderr
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_half_way(encoder: Path, tmp_path: Path):
    with command(encoder, "-o", tmp_path / "out.onnx", *ENCODER_OPTIONS) as process:
        deadline = time.monotonic() + 60
        while not any(tmp_path.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (130, "")
    assert stderr == "error: stopped by Ctrl-C; nothing was written\n"
    assert list(tmp_path.iterdir()) == []
