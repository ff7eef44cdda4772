"""Captured graphs before a model is ready: capture every declared bucket, prove its answers, measure its time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from .buckets import Cost, Ladder
from .errors import CaptureError, OrtgraphError
from .preflight import Preflight, worst_error
from .providers.base import Array, HostArrays, Provider
from .signature import Signature, Sizes

MAX_BUCKETS = 512
_TIMED_REPLAYS = 5


@dataclass(frozen=True)
class Captured:
    """What was captured: the seconds of one replay by bucket, and a sentence for each bucket that was not."""

    seconds: dict[Sizes, float]
    notes: list[str]


def capture_buckets(
    provider: Provider,
    signature: Signature,
    ladders: Sequence[Ladder | None],
    preflight: Preflight,
    *,
    is_required: bool,
) -> Captured:
    """Capture the product of the ladders and check each bucket's replay against an eager run on random inputs.

    Raises:
        CaptureError: something could not be captured or gave other answers, and `is_required`.
    """
    notes = []
    sizes = [ladder or () for ladder in ladders]
    without = [dim.name for dim, ladder in zip(signature.dims, ladders, strict=True) if not ladder]
    buckets = list(itertools.product(*sizes)) if not without else []
    if without:
        notes.append(f"nothing is captured: dimension '{without[0]}' has no sizes in buckets")
    if len(buckets) > MAX_BUCKETS:
        raise CaptureError(f"buckets make {len(buckets)} graphs, more than {MAX_BUCKETS}; give fewer sizes")
    shapes = {b: {s.name: signature.shape(s, b) for s in signature.inputs if s.is_required} for b in buckets}
    failed = provider.capture(shapes)
    seconds = {}
    for bucket in buckets:
        if bucket not in failed:
            try:
                seconds[bucket] = _prove(provider, signature, bucket, preflight)
            except OrtgraphError as error:
                failed[bucket] = str(error)
                provider.drop(bucket)
    reasons = dict.fromkeys(failed.values())
    for reason in reasons:
        names = [bucket for bucket, why in failed.items() if why == reason]
        notes.append(f"{len(names)} of {len(buckets)} buckets run eager: {reason}")
    if notes and is_required:
        raise CaptureError(f"graph_capture is required, but {notes[0]}")
    return Captured(seconds, notes)


def _prove(provider: Provider, signature: Signature, bucket: Sizes, preflight: Preflight) -> float:
    """Compare the bucket's replay with an eager run on random inputs; the best seconds of a few replays."""
    inputs = preflight.random_inputs(bucket)
    eager = preflight.run_exact(inputs)
    replayed = _replay(provider, signature, bucket, inputs)
    for spec in signature.outputs:
        error = worst_error(replayed[spec.name], eager[spec.name], spec.dtype)
        if error > max(spec.dtype.tolerance, provider.rounding):
            raise CaptureError(f"output '{spec.name}' of a replay differs by {error:.1e} from an eager run")
    del replayed
    best = float("inf")
    for _ in range(_TIMED_REPLAYS):
        start = time.perf_counter()
        _replay(provider, signature, bucket, inputs)
        best = min(best, time.perf_counter() - start)
    return best


def _replay(provider: Provider, signature: Signature, bucket: Sizes, inputs: dict[str, Array]) -> HostArrays:
    slot = provider.slot(bucket)
    try:
        for spec in signature.inputs:
            if spec.name in inputs:
                slot.stage(spec.name, spec.dtype, inputs[spec.name].shape)[...] = inputs[spec.name]
        return slot.launch([spec.name for spec in signature.outputs]).wait()
    finally:
        provider.give_back(slot)


def replay_cost(seconds: dict[Sizes, float], eager: Cost) -> Cost:
    """The measured time of a captured bucket; an eager run is estimated as the largest replay and what `eager` says."""
    worst = max(seconds.values(), default=0.0)

    def cost(sizes: Sizes) -> float:
        known = seconds.get(sizes)
        return known if known is not None else worst + eager(sizes)

    return cost
