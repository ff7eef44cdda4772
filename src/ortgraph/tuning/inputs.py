"""Inputs for a measurement: which sizes, and values that the model takes."""

from __future__ import annotations

from collections.abc import Mapping

from .. import signature as signatures
from ..config import ModelConfig
from ..preflight import Preflight, RunExact
from ..providers.base import Array
from ..signature import Signature, Sizes, TensorSpec

GUESSES = (32, 8, 224)  # sizes for a dimension that nothing is known of, in turn until one runs


def build_signature(
    config: ModelConfig,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    addressed: tuple[str, ...] = (),
) -> Signature:
    """The model's dimensions, with those that `addressed` and the config's buckets name."""
    names = (*config.buckets, *(name for name in addressed if name not in config.buckets))
    return signatures.build(inputs, outputs, is_batched=config.max_batch_size > 0, addressed=names)


def known_sizes(config: ModelConfig, signature: Signature) -> dict[int, int]:
    """The dimensions, by place, whose size config.pbtxt fixes."""
    offset = 1 if signature.is_batched else 0
    fixed = {(t.name, axis + offset): size for t in config.inputs for axis, size in enumerate(t.dims) if size > 0}
    return {i: fixed[axis] for i, dim in enumerate(signature.dims) for axis in dim.axes if axis in fixed}


def first_sizes(config: ModelConfig, signature: Signature, given: Mapping[str, int]) -> list[Sizes]:
    """Sizes to try in turn: those given; else the config's; else 1 for what may be the batch, and a guess."""
    chosen = {signature.index(name): size for name, size in given.items()}
    known = known_sizes(config, signature) | chosen
    ladders = {signature.index(name): ladder for name, ladder in config.buckets.items()}

    def size(place: int, guess: int) -> int:
        if place in known:
            return known[place]
        if any(axis == 0 for _, axis in signature.dims[place].axes):
            return 1
        ladder = ladders.get(place)
        return ladder[len(ladder) // 2] if ladder else guess

    return list(dict.fromkeys(tuple(size(i, guess) for i in range(len(signature.dims))) for guess in GUESSES))


def random_inputs(config: ModelConfig, signature: Signature, run: RunExact, sizes: Sizes) -> dict[str, Array]:
    """Inputs of these sizes as the proof before ready draws them: within `value_ranges`, else small numbers."""
    maker = Preflight(signature, run, {}, {}, config.value_ranges)
    return maker.random_inputs(sizes)
