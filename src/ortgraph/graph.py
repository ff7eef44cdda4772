"""The life of a bucket: captured before the model is ready or on demand, proven against an eager run, retired.

Nothing else asks a provider to capture, so that without `captures_on_demand` nothing is captured after ready.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from .buckets import Cost, Ladder
from .errors import CaptureError, OrtgraphError
from .preflight import Preflight
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
    on_demand: int = 0,
) -> Captured:
    """Capture the product of the ladders and check each bucket's replay against an eager run on random inputs.

    Raises:
        CaptureError: something could not be captured or gave other answers, and `is_required`.
    """
    notes = []
    sizes = [ladder or () for ladder in ladders]
    without = [dim.name for dim, ladder in zip(signature.dims, ladders, strict=True) if not ladder]
    buckets = list(itertools.product(*sizes)) if not without else []
    if without and not on_demand:
        notes.append(f"nothing is captured: dimension '{without[0]}' has no sizes in buckets")
    elif without and provider.why_eager:
        notes.append(f"nothing is captured: {provider.capture_note or provider.why_eager}")
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
                provider.retire([bucket])
    reasons = dict.fromkeys(failed.values())
    for reason in reasons:
        names = [bucket for bucket, why in failed.items() if why == reason]
        notes.append(f"{len(names)} of {len(buckets)} buckets run eager: {reason}")
    if notes and is_required:
        raise CaptureError(f"graph_capture is required, but {notes[0]}")
    return Captured(seconds, notes)


class OnDemand:
    """Captures exact shapes as they are seen, at most `limit` at a time: the least recently used one is retired.

    All calls come from the thread that launches. A shape that cannot be captured, or whose replay is not proven,
    runs eager and is not tried again.
    """

    def __init__(self, provider: Provider, signature: Signature, preflight: Preflight, limit: int) -> None:
        self._provider = provider
        self._signature = signature
        self._preflight = preflight
        self._limit = limit
        self._live: OrderedDict[Sizes, None] = OrderedDict()
        self._refused: OrderedDict[Sizes, str] = OrderedDict()

    def admit(self, bucket: Sizes) -> None:
        """Have a graph for this bucket, if it can be: what was declared is there, what was retired comes back."""
        if bucket in self._live:
            self._live.move_to_end(bucket)
            return
        if not self._provider.eager_reason(bucket) or bucket in self._refused or min(bucket, default=1) < 1:
            return
        if len(self._live) >= self._limit:
            self._provider.retire([self._live.popitem(last=False)[0]])
        reason = self._capture(bucket)
        if not reason:
            self._live[bucket] = None
            return
        self._refused[bucket] = reason
        if len(self._refused) > MAX_BUCKETS:
            self._refused.popitem(last=False)

    def _capture(self, bucket: Sizes) -> str:
        shapes = {s.name: self._signature.shape(s, bucket) for s in self._signature.inputs if s.is_required}
        reason = self._provider.capture({bucket: shapes}).get(bucket, "")
        if not reason:
            try:
                _prove(self._provider, self._signature, bucket, self._preflight, replays=0)
            except OrtgraphError as error:
                self._provider.retire([bucket])
                reason = str(error)
        return reason


def _prove(
    provider: Provider, signature: Signature, bucket: Sizes, preflight: Preflight, replays: int = _TIMED_REPLAYS
) -> float:
    """Compare the bucket's replay with an eager run on random inputs; the best seconds of so many replays more."""
    inputs = preflight.random_inputs(bucket)
    eager = preflight.run_exact(inputs)
    replayed = _replay(provider, signature, bucket, inputs)
    for spec in signature.outputs:
        if error := preflight.error(spec.name, replayed[spec.name], eager[spec.name]):
            raise CaptureError(f"output '{spec.name}' of a replay differs by {error:.1e} from an eager run")
    del replayed
    best = float("inf")
    for _ in range(replays):
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
