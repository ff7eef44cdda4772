"""`text_recognition`: PP-OCRv4's recognition model as it is, and its character table for the client.

Input `x` FP32 [batch, 3, 48, width], output `softmax_11.tmp_0` FP32 [batch, (width + 3) // 8, 6625]: one distribution
over the classes a step. Class 0 is CTC's blank, the last one a space; the model file's metadata holds those between.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort

from models.encoder_spec import ModelBuildError
from models.packages import PinnedWheel

NAME = "text_recognition"
_MODEL = "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx"
WHEEL = PinnedWheel(
    name="rapidocr-onnxruntime",
    version="1.4.4",
    sha256="971d7d5f223a7a808662229df1ef69893809d8457d834e6373d3854bc1782cbf",
    size_bytes=14_915_192,
    members=(_MODEL,),
)
CLASSES = 6625
BLANK_LABEL = "<blank>"


def build(source: Path, report: Callable[[str], None]) -> dict[str, bytes]:
    """Files for the model's folder by relative path. Raises ModelBuildError when the file is not what is expected."""
    content = (source / _MODEL).read_bytes()
    session = ort.InferenceSession(content, providers=["CPUExecutionProvider"])
    names = labels(session)
    (output,) = session.run(None, {"x": np.zeros((2, 3, 48, 160), dtype=np.float32)})
    report(f"{NAME}: [2, 3, 48, 160] gives {list(output.shape)}, {len(names)} labels")
    if output.shape != (2, 20, CLASSES) or len(names) != CLASSES:
        raise ModelBuildError(
            f"{NAME}: [2, 3, 48, 160] must give [2, 20, {CLASSES}] and as many labels, "
            f"got {list(output.shape)} and {len(names)} labels"
        )
    return {"1/model.onnx": content, "labels.txt": ("\n".join(names) + "\n").encode()}


def labels(session: ort.InferenceSession) -> list[str]:
    """The text of each class: the blank, the characters of the model's metadata, a space."""
    characters = session.get_modelmeta().custom_metadata_map.get("character", "")
    return [BLANK_LABEL, *characters.split("\n"), " "]
