"""What plain onnxruntime, alone, answers: the measure for the sample models behind the server."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import onnxruntime as ort

from ortgraph.server import ROOT

Array = np.ndarray[Any, Any]
REPOSITORY = ROOT / "model_repository"
TOLERANCE = 1e-4
RECOGNIZED = "softmax_11.tmp_0"
VOCABULARY = 30_522


@cache
def _session(model: str) -> ort.InferenceSession:
    return ort.InferenceSession(REPOSITORY / model / "1" / "model.onnx", providers=["CPUExecutionProvider"])


def plain(model: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """One `session.run` of the repository's ONNX file."""
    session = _session(model)
    return dict(zip([node.name for node in session.get_outputs()], session.run(None, dict(inputs)), strict=True))


def token_rows(rows: int, length: int, seed: int) -> dict[str, Array]:
    """Token ids and masks of text_embedding; each row has a length of its own, the first the whole one."""
    random = np.random.default_rng(seed)
    mask = np.zeros((rows, length), np.int64)
    for row in range(rows):
        mask[row, : length if row == 0 else random.integers(1, length + 1)] = 1
    return {"input_ids": random.integers(0, VOCABULARY, (rows, length)) * mask, "attention_mask": mask}


def line_image(rows: int, width: int, seed: int) -> dict[str, Array]:
    """Pictures of text_recognition's size, in its range of -1 to 1."""
    random = np.random.default_rng(seed)
    return {"x": random.uniform(-1, 1, (rows, 3, 48, width)).astype(np.float32)}


def assert_same(got: Mapping[str, Array], wanted: Mapping[str, Array]) -> None:
    """Equal names, shapes, dtypes, and values within the tolerance of float32 sums in another order."""
    assert got.keys() == wanted.keys()
    for name, array in wanted.items():
        assert (got[name].shape, got[name].dtype) == (array.shape, array.dtype), name
        np.testing.assert_allclose(got[name], array, rtol=0, atol=TOLERANCE, err_msg=name)
