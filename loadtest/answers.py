"""Is an answer right? Compared with plain onnxruntime's, within the element type's tolerance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# How far two right answers may lie apart, relative to the largest value of the expected one.
TOLERANCES: Mapping[str, float] = {"float16": 1e-2, "float32": 1e-3, "float64": 1e-5, "bfloat16": 5e-2}


class WrongAnswerError(Exception):
    """The server answered, but not with what onnxruntime gives for the same input."""


def check_answer(
    expected: Mapping[str, Array], got: Mapping[str, Array | None], tolerance: float | None = None
) -> None:
    """Compare every expected output.

    Args:
        tolerance: for floating-point outputs instead of the type's own, relative to the largest expected value.

    Raises:
        WrongAnswerError: an output is missing, or its type, shape or values differ.
    """
    for name, right in expected.items():
        array = got.get(name)
        if array is None:
            raise WrongAnswerError(f"output '{name}' is missing")
        if array.shape != right.shape or array.dtype != right.dtype:
            raise WrongAnswerError(
                f"output '{name}' must be {right.dtype}{list(right.shape)}, got {array.dtype}{list(array.shape)}"
            )
        own = TOLERANCES.get(right.dtype.name)
        if own is None:
            if not np.array_equal(array, right):
                raise WrongAnswerError(f"output '{name}' differs from onnxruntime's")
        elif right.size:
            allowed = (own if tolerance is None else tolerance) * float(np.abs(right).max())
            error = float(np.abs(array - right).max())
            if not error <= allowed:  # also where it is NaN
                raise WrongAnswerError(f"output '{name}' is off by {error:.1e}, allowed {allowed:.1e}")
