"""Real models out of packages, unpacked into .cache once."""

from __future__ import annotations

from pathlib import Path

from models import text_recognition
from models.__main__ import ROOT
from models.packages import PinnedWheel, unpack

_DETECTION = "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx"
_RECOGNITION = "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx"
_OCR = PinnedWheel(
    text_recognition.WHEEL.name,
    text_recognition.WHEEL.version,
    text_recognition.WHEEL.sha256,
    text_recognition.WHEEL.size_bytes,
    (_DETECTION, _RECOGNITION),
)
_SILERO = PinnedWheel(
    name="silero-vad",
    version="6.2.3",
    sha256="7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8",
    size_bytes=11_317_527,
    members=("silero_vad/data/silero_vad.onnx", "silero_vad/data/silero_vad_op18_ifless.onnx"),
)
_MAGIKA = PinnedWheel(
    name="magika",
    version="1.0.3",
    sha256="3e9b49134e8116ee40b431664dcbed9e199413efddcce1a173c734b4e0521529",
    size_bytes=16_244_594,
    members=("magika/models/standard_v3_3/model.onnx",),
)


def _member(wheel: PinnedWheel, number: int) -> Path:
    return unpack(wheel, ROOT / ".cache") / wheel.members[number]


def text_detection() -> Path:
    """PP-OCRv4 detection: x [?, 3, ?, ?] to a map of the same height and width."""
    return _member(_OCR, 0)


def recognition() -> Path:
    """PP-OCRv4 recognition: x [?, 3, 48, width]."""
    return _member(_OCR, 1)


def voice_activity() -> Path:
    """silero-vad: input [?, ?], state [2, ?, 128] and the rate sr, on which it branches, as on sizes."""
    return _member(_SILERO, 0)


def voice_activity_18() -> Path:
    """silero-vad of opset 18, which branches on sr alone."""
    return _member(_SILERO, 1)


def file_type() -> Path:
    """magika: bytes INT32 [?, 2048], 0 to 256."""
    return _member(_MAGIKA, 0)
