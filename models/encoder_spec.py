"""What a BERT-style encoder looks like, and the names and shapes of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Weights = Mapping[str, Array]


class ModelBuildError(Exception):
    """A sample model could not be built. The message is one line: what, the rule, what was got, what to change."""


@dataclass(frozen=True)
class EncoderSpec:
    """Sizes and choices of one encoder. The defaults are BERT-base with mean pooling.

    fused: ONNX Runtime's contrib operators; otherwise only standard ONNX operators.
    pooling: "mean" over the positions whose mask is 1, "cls" for the first position, "none" for every position.
    normalise: divide the pooled row by its L2 norm.
    """

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    intermediate: int = 3072
    vocab: int = 30522
    max_positions: int = 512
    dtype: Literal["fp32", "fp16"] = "fp32"
    fused: bool = True
    pooling: Literal["mean", "cls", "none"] = "mean"
    normalise: bool = False
    layer_norm_epsilon: float = 1e-12

    def __post_init__(self) -> None:
        sizes = ("layers", "hidden", "heads", "intermediate", "vocab", "max_positions")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ModelBuildError(f"EncoderSpec.{name} must be at least 1, got {getattr(self, name)}")
        if self.hidden % self.heads:
            raise ModelBuildError(
                f"EncoderSpec.hidden must be a multiple of heads, got hidden={self.hidden} and heads={self.heads}"
            )
        if self.dtype not in ("fp32", "fp16"):
            raise ModelBuildError(f"EncoderSpec.dtype must be fp32 or fp16, got {self.dtype!r}")
        if self.pooling not in ("mean", "cls", "none"):
            raise ModelBuildError(f"EncoderSpec.pooling must be mean, cls or none, got {self.pooling!r}")

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def numpy_dtype(self) -> Any:
        return np.float16 if self.dtype == "fp16" else np.float32


# Two layers of 32: small enough for every test, and for a software GPU.
TINY = EncoderSpec(layers=2, hidden=32, heads=4, intermediate=64, vocab=100, max_positions=64)
BERT_BASE_FP16 = EncoderSpec(dtype="fp16")


def weight_shapes(spec: EncoderSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight, by the names that BERT checkpoints use (dense weights are [out, in])."""
    hidden, wide = spec.hidden, spec.intermediate
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (spec.vocab, hidden),
        "embeddings.position_embeddings.weight": (spec.max_positions, hidden),
        "embeddings.token_type_embeddings.weight": (2, hidden),
        "embeddings.LayerNorm.weight": (hidden,),
        "embeddings.LayerNorm.bias": (hidden,),
    }
    dense = {
        "attention.self.query": (hidden, hidden),
        "attention.self.key": (hidden, hidden),
        "attention.self.value": (hidden, hidden),
        "attention.output.dense": (hidden, hidden),
        "intermediate.dense": (wide, hidden),
        "output.dense": (hidden, wide),
    }
    for layer in range(spec.layers):
        prefix = f"encoder.layer.{layer}."
        for name, shape in dense.items():
            shapes[f"{prefix}{name}.weight"] = shape
            shapes[f"{prefix}{name}.bias"] = shape[:1]
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes[f"{prefix}{name}.weight"] = (hidden,)
            shapes[f"{prefix}{name}.bias"] = (hidden,)
    return shapes


def random_weights(spec: EncoderSpec, seed: int) -> dict[str, Array]:
    """Weights of BERT's initial spread (normal, 0.02; norms near 1). The same spec and seed give the same weights."""
    rng = np.random.default_rng(seed)
    weights: dict[str, Array] = {}
    for name, shape in weight_shapes(spec).items():
        values = rng.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
        weights[name] = values + np.float32(1) if name.endswith("LayerNorm.weight") else values
    return weights


def check_weights(spec: EncoderSpec, weights: Weights) -> None:
    """Raise ModelBuildError for the first weight that is missing or has another shape than the spec says."""
    for name, shape in weight_shapes(spec).items():
        if name not in weights:
            raise ModelBuildError(f"weight {name} must be present with shape {shape}, got none; check the EncoderSpec")
        if weights[name].shape != shape:
            raise ModelBuildError(
                f"weight {name} must have shape {shape}, got {weights[name].shape}; check the EncoderSpec"
            )
