"""What is tuned: a model as it is configured, the load, and ways to configure it otherwise."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..buckets import Item
from ..config import ModelConfig
from ..dtypes import DType
from ..engine import Engine
from ..signature import Signature, Sizes
from .inprocess import EngineSubject
from .load import Load, TuningError, batches, default_lengths
from .pairs import Settings

BATCHES = 4  # different batches of requests; each slice of a measurement takes the next ones
MAX_SHARES = 10


@dataclass(frozen=True)
class Variant:
    """The same model in another weight format."""

    path: Path
    has_nbits: bool


@dataclass(frozen=True)
class Model:
    """A model directory as this package needs it.

    `parameters` are those written in its config, `operators` those of its graph. `configure` and `served_text` give
    the config with other settings: as the engine reads it, and as the server does.
    """

    config: ModelConfig
    parameters: Mapping[str, str]
    operators: frozenset[str]
    has_batching: bool
    instances: int
    variants: Mapping[str, Variant]
    configure: Callable[[Settings], ModelConfig]
    served_text: Callable[[Settings], str]


@dataclass(frozen=True)
class Case:
    """A model under its load, and what its engine says of it as configured now.

    `per_batch` requests come together; `shares` holds at which sizes the load's groups run, and how often; `buckets`
    are all declared ones.
    """

    model: Model
    load: Load
    provider: str
    signature: Signature
    dtypes: Mapping[str, DType]
    rounding: float
    is_asynchronous: bool
    per_batch: int
    batches: list[list[dict[str, Any]]]
    shares: Mapping[Sizes, float]
    padded: tuple[bool, ...]
    buckets: list[Sizes]


def examine(model: Model, lengths: Mapping[int, float] | None, clients: int, rows: int) -> Case:
    """Load the model as it is configured, and draw the requests of the load.

    Raises:
        LoadError: it cannot be served.
        TuningError: it does not take so many rows, or does not answer the load.
    """
    config = model.config
    if config.max_batch_size and rows > config.max_batch_size:
        raise TuningError(f"--rows {rows} is more than max_batch_size {config.max_batch_size}")
    engine = Engine.load(config)
    try:
        signature = engine.signature
        load = Load(clients, rows, lengths or default_lengths(config, signature))
        is_joined = signature.is_batched and model.has_batching
        per_batch = min(clients, config.max_batch_size // rows) if is_joined else 1
        drawn = batches(config, signature, load, per_batch=per_batch, count=BATCHES)
        EngineSubject(engine, drawn[:1])  # without answers to this load there is nothing to compare
        return Case(
            model=model,
            load=load,
            provider=engine.provider_name,
            signature=signature,
            dtypes={spec.name: spec.dtype for spec in signature.inputs + signature.outputs},
            rounding=engine._provider.rounding,
            is_asynchronous=engine.is_asynchronous,
            per_batch=per_batch,
            batches=drawn,
            shares=_shares(engine, drawn),
            padded=engine.table.padded,
            buckets=list(itertools.product(*(ladder or () for ladder in engine.table.ladders))),
        )
    finally:
        engine.close()


def _shares(engine: Engine, batches: Sequence[Sequence[Mapping[str, Any]]]) -> dict[Sizes, float]:
    """At which sizes the load's groups run, and how often; an exact size is rounded up to a power of two."""
    counts: Counter[Sizes] = Counter()
    for batch in batches:
        sizes = [engine.signature.sizes({n: a.shape for n, a in inputs.items()})[0] for inputs in batch]
        for group in engine.table.group([Item(i, each) for i, each in enumerate(sizes)]):
            known = group.bucket or tuple(1 << (size - 1).bit_length() for size in group.sizes)
            counts[known] += 1
    return dict(counts.most_common(MAX_SHARES))
