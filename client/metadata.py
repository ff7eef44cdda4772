"""What the server says of a model, the same for both protocols."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TensorMetadata:
    """`shape` has -1 where a size is free; with batching, the first is the batch."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ModelMetadata:
    """Names, dtypes and shapes of a model's inputs and outputs."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


def model_metadata(answer: Mapping[str, Any]) -> ModelMetadata:
    """From the JSON of either protocol (gRPC's writes sizes as text)."""

    def tensors(key: str) -> tuple[TensorMetadata, ...]:
        return tuple(
            TensorMetadata(each["name"], each["datatype"], tuple(int(size) for size in each.get("shape", ())))
            for each in answer.get(key, ())
        )

    versions = tuple(answer.get("versions", ()))
    return ModelMetadata(answer["name"], versions, answer.get("platform", ""), tensors("inputs"), tensors("outputs"))
