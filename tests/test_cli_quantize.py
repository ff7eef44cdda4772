"""`ortgraph quantize` on real models; answers are compared with plain ONNX Runtime."""

from __future__ import annotations

import json
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

from models import text_embedding
from models.__main__ import ROOT, build_sample
from models.encoder import EncoderSpec, build
from ortgraph.cli import app, files

ENCODER = EncoderSpec(layers=1, hidden=128, heads=4, intermediate=256, vocab=400, fused=False)
ENCODER_OPTIONS = ("--sizes", "batch=8; sequence=16", "--value-ranges", "input_ids=0..399")
SENTENCES = (
    "a cat sits on the mat",
    "a cat is sitting on a rug",
    "stock prices fell sharply today",
    "markets closed lower after a volatile session on Wall Street",
    "the train to Berlin leaves at noon",
    "our departure for Berlin is at twelve o'clock",
    "whisk two eggs with a little milk",
    "beat the eggs and add some milk",
)


def quantize(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["quantize", *map(str, arguments)])


def quantised(source: Path, target: Path, *arguments: str) -> dict[str, Any]:
    done = quantize(source, "-o", target, "--json", *arguments)
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def refused(target: Path, *arguments: str | Path) -> str:
    """The one line of a command that fails and leaves nothing in the target's folder that was not there."""
    before = sorted(target.parent.iterdir())
    done = quantize(*arguments, "-o", target)
    assert (done.exit_code, done.stdout) == (1, ""), done.output
    assert sorted(target.parent.iterdir()) == before
    lines = done.stderr.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def run(path: Path, inputs: dict[str, Any]) -> list[Any]:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return [np.asarray(array, np.float32) for array in session.run(None, inputs)]


def products(path: Path) -> dict[str, Any]:
    """The attributes of each MatMulNBits by its name, and MatMul as they are."""
    nodes = onnx.load(str(path)).graph.node
    return {
        node.name: {attribute.name: attribute.i for attribute in node.attribute}
        for node in nodes
        if node.op_type in ("MatMul", "MatMulNBits")
    }


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoder") / "model.onnx"
    onnx.save(build(ENCODER, seed=4), str(path))
    return path


def sample() -> dict[str, Any]:
    ids = np.random.default_rng(9).integers(0, ENCODER.vocab, (6, 11))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


@pytest.mark.parametrize(
    ("bits", "options", "most"),
    [(4, (), 0.15), (8, ("--block-size", "64"), 0.01), (4, ("--symmetric", "--block-size", "128"), 0.3)],
)
def test_weights_of_an_encoder(encoder: Path, tmp_path: Path, bits: int, options: tuple[str, ...], most: float):
    target = tmp_path / "out.onnx"
    report = quantised(encoder, target, "--bits", str(bits), *options, *ENCODER_OPTIONS)
    assert (report["quantised"], report["kept"], report["fit_fpa_intb_gemm"]) == (6, [], 0)
    found = [node for node in products(target).values() if node]
    block = int(options[-1]) if options else 32
    assert {(node["bits"], node["block_size"]) for node in found} == {(bits, block)} and len(found) == 6
    assert report["after"]["size_bytes"] == target.stat().st_size < 0.75 * report["before"]["size_bytes"]
    (wanted,), (got,) = run(encoder, sample()), run(target, sample())
    error = np.abs(got - wanted).max() / np.abs(wanted).max()
    assert 1e-4 < error < most
    (output,) = report["outputs"]
    assert output["mean"] > 0 and output["worst"] < most and output["cosine"] > 0.95
    assert 0.5 < output["same_order"] <= 1 and 0 <= output["same_nearest"] <= 1


def test_the_report_counts_what_the_answers_show(encoder: Path, tmp_path: Path):
    """Every figure of the report, computed here anew from the two files and the inputs that were given."""
    rows = sample()
    np.savez(tmp_path / "rows.npz", **rows)
    report = quantised(encoder, tmp_path / "out.onnx", "--inputs", str(tmp_path / "rows.npz"))
    (wanted,), (got,) = run(encoder, rows), run(tmp_path / "out.onnx", rows)
    (found,) = report["outputs"]
    assert found["worst"] == pytest.approx(np.abs(got - wanted).max() / np.abs(wanted).max(), rel=1e-3)
    assert found["mean"] == pytest.approx(np.abs(got - wanted).mean() / np.abs(wanted).mean(), rel=1e-3)

    def cosines(a: Any, b: Any) -> Any:
        return a @ b.T / np.linalg.norm(a, axis=1)[:, None] / np.linalg.norm(b, axis=1)

    assert found["cosine"] == pytest.approx(cosines(got, wanted).diagonal().min(), abs=1e-5)
    assert found["same_largest"] == pytest.approx((got.argmax(1) == wanted.argmax(1)).mean())
    near, near_wanted = cosines(got, got) - 2 * np.eye(6), cosines(wanted, wanted) - 2 * np.eye(6)
    assert found["same_nearest"] == pytest.approx((near.argmax(1) == near_wanted.argmax(1)).mean())
    order = [
        (near[i, j] > near[i, k]) == (near_wanted[i, j] > near_wanted[i, k])
        for i in range(6)
        for j in range(6)
        for k in range(j)
        if i not in (j, k)
    ]
    assert found["same_order"] == pytest.approx(np.mean(order))


def test_neighbours_of_real_sentences(tmp_path: Path):
    build_sample(text_embedding, ROOT / "model_repository", ROOT / ".cache")
    folder = ROOT / "model_repository" / text_embedding.NAME
    tokenizer = text_embedding.load_tokenizer(folder / "tokenizer.json")
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(list(SENTENCES))
    inputs = {
        "input_ids": np.array([row.ids for row in encoded]),
        "attention_mask": np.array([row.attention_mask for row in encoded]),
    }
    np.savez(tmp_path / "sentences.npz", **inputs)
    given = ("--inputs", str(tmp_path / "sentences.npz"))
    eight = quantised(folder / "1" / "model.onnx", tmp_path / "8.onnx", *given, "--bits", "8", "--tolerance", "0.02")
    assert eight["outputs"][0]["same_nearest"] == 1 and eight["outputs"][0]["cosine"] > 0.999
    (note,) = eight["notes"]
    assert note.startswith("6 Attention not quantised: ONNX Runtime's quantiser takes MatMul alone")
    four = quantised(folder / "1" / "model.onnx", tmp_path / "4.onnx", *given)
    assert four["outputs"][0]["worst"] > eight["outputs"][0]["worst"] and four["outputs"][0]["cosine"] > 0.9
    (rows,) = run(tmp_path / "4.onnx", inputs)
    scores = rows @ rows.T - 2 * np.eye(len(rows))
    assert scores.argmax(1).tolist() == [1, 0, 3, 2, 5, 4, 7, 6]  # the pairs stay together
    line = refused(tmp_path / "no.onnx", folder / "1" / "model.onnx", *given, "--tolerance", "0.001")
    assert line.startswith("error: output 'embedding' lies ") and line.endswith("nothing was written")


def test_layers_are_kept_by_name_or_glob(encoder: Path, tmp_path: Path):
    options = ("--exclude", "*.output.dense.product", "--exclude", "encoder.layer.0.attention.self.query.weight")
    report = quantised(encoder, tmp_path / "out.onnx", *options, *ENCODER_OPTIONS)
    kept = {f"encoder.layer.0.{name}.product" for name in ("attention.output.dense", "output.dense")}
    assert set(report["kept"]) == kept | {"encoder.layer.0.attention.self.query.product"}
    assert report["quantised"] == 3
    plain = {name for name, attributes in products(tmp_path / "out.onnx").items() if not attributes}
    assert plain >= set(report["kept"])
    line = refused(tmp_path / "no.onnx", encoder, "--exclude", "decoder*", *ENCODER_OPTIONS)
    assert line.startswith("error: --exclude: no MatMul or weight is called 'decoder*'")
    assert "no MatMul with a constant weight" in refused(
        tmp_path / "no.onnx", encoder, "--exclude", "*", *ENCODER_OPTIONS
    )


def test_half_precision_fits_the_gpus_fast_kernels(encoder: Path, tmp_path: Path):
    half = tmp_path / "half.onnx"
    assert CliRunner().invoke(app, ["optimize", str(encoder), "-o", str(half), "--fp16"]).exit_code == 0
    report = quantised(half, tmp_path / "out.onnx", *ENCODER_OPTIONS)
    assert report["quantised"] == report["fit_fpa_intb_gemm"] == 3
    assert quantised(half, tmp_path / "16.onnx", "--block-size", "16", *ENCODER_OPTIONS)["fit_fpa_intb_gemm"] == 0
    (wanted,), (got,) = run(half, sample()), run(tmp_path / "out.onnx", sample())
    assert np.abs(got - wanted).max() < 0.15 * np.abs(wanted).max()


def test_a_quantised_encoder_is_optimised_to_half_precision(encoder: Path, tmp_path: Path):
    """The order in which all products are quantised: fused attention has none that the quantiser takes."""
    quantised(encoder, tmp_path / "8.onnx", "--bits", "8", *ENCODER_OPTIONS)
    done = CliRunner().invoke(app, ["optimize", str(tmp_path / "8.onnx"), "-o", str(tmp_path / "half.onnx"), "--fp16"])
    assert done.exit_code == 0, done.output
    assert sum(bool(attributes) for attributes in products(tmp_path / "half.onnx").values()) == 6
    (wanted,), (got,) = run(encoder, sample()), run(tmp_path / "half.onnx", sample())
    assert np.abs(got - wanted).max() < 0.02 * np.abs(wanted).max()


def test_recognition_with_constant_nodes_and_file_type(tmp_path: Path):
    report = quantised(wheels.recognition(), tmp_path / "rec.onnx", "--bits", "8", "--sizes", "x[2]=48; x[3]=96")
    assert report["quantised"] == 9 and report["outputs"][0]["same_largest"] > 0.9
    pixels = np.random.default_rng(0).standard_normal((1, 3, 48, 160)).astype(np.float32)
    (wanted,), (got,) = (run(path, {"x": pixels}) for path in (wheels.recognition(), tmp_path / "rec.onnx"))
    assert np.abs(got - wanted).max() < 0.1
    options = ("--value-ranges", "bytes=0..256", "--sizes", "bytes[0]=4", "--tolerance", "0.05")
    assert quantised(wheels.file_type(), tmp_path / "type.onnx", *options)["quantised"] == 2


def test_a_weight_of_two_products_and_one_inside_a_branch(tmp_path: Path):
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    branch = [
        helper.make_graph(
            [helper.make_node("MatMul", ["b", "w"], [f"{kind}_c"], name="inner")],
            kind,
            [],
            [helper.make_tensor_value_info(f"{kind}_c", TensorProto.FLOAT, None)],
        )
        for kind in ("then", "else")
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("MatMul", ["a", "w"], ["b"]),
        helper.make_node("If", ["flag"], ["y"], then_branch=branch[0], else_branch=branch[1]),
    ]
    tensors = [("x", toys.F32, ["n", 64]), ("flag", toys.BOOL, [])]
    model = toys.model(nodes, tensors, [("y", toys.F32, ["n", 64])], {"w": weight})
    onnx.save(model, str(tmp_path / "shared.onnx"))
    report = quantised(tmp_path / "shared.onnx", tmp_path / "out.onnx", "--bits", "8", "--tolerance", "0.05")
    assert report["quantised"] == 4
    x = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    for flag in (True, False):
        inputs = {"x": x, "flag": np.array(flag)}
        (wanted,), (got,) = run(tmp_path / "shared.onnx", inputs), run(tmp_path / "out.onnx", inputs)
        np.testing.assert_allclose(got, wanted, atol=0.05 * np.abs(wanted).max())


def test_of_whole_numbers_the_share_that_changed_is_reported(tmp_path: Path):
    weight = np.random.default_rng(5).standard_normal((32, 32)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("ArgMax", ["a"], ["y"], axis=1, keepdims=0),
    ]
    model = toys.model(nodes, [("x", toys.F32, ["n", 32])], [("y", toys.I64, ["n"])], {"w": weight})
    onnx.save(model, str(tmp_path / "model.onnx"))
    x = np.random.default_rng(6).standard_normal((300, 32)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x)
    given = ("--inputs", str(tmp_path / "x.npz"), "--block-size", "16")
    report = quantised(tmp_path / "model.onnx", tmp_path / "out.onnx", *given)
    (wanted,), (got,) = run(tmp_path / "model.onnx", {"x": x}), run(tmp_path / "out.onnx", {"x": x})
    assert 0 < report["outputs"][0]["worst"] == np.mean(wanted != got) < 0.3
    refused(tmp_path / "no.onnx", tmp_path / "model.onnx", *given, "--tolerance", "0.001")


def test_nans_are_refused_without_a_tolerance(tmp_path: Path):
    """Weights that 4 bits round to 0, and then a division by them."""
    weight = np.full((32, 32), 1e-3, np.float32)
    weight[0] = 1e6
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Div", ["x", "a"], ["y"]),
    ]
    model = toys.model(nodes, [("x", toys.F32, ["n", 32])], [("y", toys.F32, ["n", 32])], {"w": weight})
    onnx.save(model, str(tmp_path / "model.onnx"))
    x = np.ones((2, 32), np.float32)
    x[:, 0] = 0
    np.savez(tmp_path / "x.npz", x=x)
    folder = tmp_path / "out"
    folder.mkdir()
    line = refused(folder / "out.onnx", tmp_path / "model.onnx", "--inputs", tmp_path / "x.npz", "--symmetric")
    assert line == "error: output 'y' has other shapes, infinities or NaNs than before; nothing was written"


def test_a_result_too_large_for_one_file_and_one_without_products(encoder: Path, tmp_path: Path, monkeypatch: Any):
    refusal = refused(tmp_path / "out.onnx", wheels.text_detection(), "--sizes", "x[0]=1; x[2]=64; x[3]=64")
    assert refusal.endswith("has no MatMul with a constant weight to quantise; nothing was written")
    monkeypatch.setattr(files, "ONE_FILE_BYTES", 100_000)
    quantised(encoder, tmp_path / "large.onnx", *ENCODER_OPTIONS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large.onnx", "large.onnx.data"]
    assert np.isfinite(run(tmp_path / "large.onnx", sample())[0]).all()


def test_usage_errors_and_help(encoder: Path, tmp_path: Path):
    for options in (("--bits", "3"), ("--block-size", "48"), ("--tolerance", "-1")):
        done = quantize(encoder, "-o", tmp_path / "out.onnx", *options)
        assert (done.exit_code, done.stdout) == (2, "") and options[0] in done.stderr
    assert "Example: ortgraph quantize" in quantize("--help").stdout
    done = quantize(encoder, "-o", tmp_path / "out.onnx", *ENCODER_OPTIONS)
    assert done.exit_code == 0 and "6 of 6 MatMul in 4 bits, blocks of 32" in done.stdout
