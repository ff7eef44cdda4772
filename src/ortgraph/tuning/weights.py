"""Which weight format is fastest at which M: the rows that a product of activations and weights has at once.

M is the product of all sizes of a bucket (rows x length). A 4-bit weight saves memory traffic, which is what a product
of few rows waits for, and costs arithmetic, which is what one of many rows waits for. So each format is measured at
each size, in turns.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..batch import Request
from ..config import ModelConfig
from ..dtypes import to_float64
from ..engine import Engine
from ..errors import OrtgraphError, RequestError
from ..providers.base import Array, HostArrays
from ..signature import Sizes

FPA_INTB = " with fpA_intB"
ROUNDS = 9
LIKE_TOLERANCE = 2e-2  # of two ways to compute with the same weights in half precision, over a whole model
_SAMPLE_S = 0.02
_DEPTH = 8  # runs on their way at once, so that the host's work hides behind the device's
_MAX_REPEATS = 50
Draw = Callable[[Sizes], dict[str, Array]]


def fpa_settings(sizes: Sequence[Sizes]) -> dict[str, str]:
    """The session settings that turn fpA_intB on; it picks its kernels for every M that it is told, and only those."""
    each = ",".join(map(str, sorted({math.prod(s) for s in sizes})))
    return {"ep.cuda.fpa_intb_gemm": "1", "ep.cuda.fpa_intb_profile_m": each}


@dataclass
class Format:
    """A weight format under test. `like` is the label of the one whose answers it has to give."""

    label: str
    config: ModelConfig
    like: str = ""


@dataclass
class FormatTable:
    """Seconds of one run by format and sizes, and what was left out and why.

    `errors` are the largest differences from the first format's answers, relative to the largest value.
    """

    sizes: list[Sizes]
    seconds: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def winner(self, row: int) -> str:
        """The fastest format at these sizes."""
        return min(self.seconds, key=lambda label: self.seconds[label][row])

    def rows(self) -> list[dict[str, Any]]:
        """For people and JSON: a row for each M."""
        return [
            {
                "m": math.prod(sizes),
                "sizes": list(sizes),
                "us": {label: round(times[row] * 1e6, 2) for label, times in self.seconds.items()},
                "winner": self.winner(row),
            }
            for row, sizes in enumerate(self.sizes)
        ]


def measure_formats(
    formats: Sequence[Format],
    sizes: Sequence[Sizes],
    draw: Draw,
    *,
    rounds: int = ROUNDS,
    is_over: Callable[[], bool] = lambda: False,
    tell: Callable[[str], None] = lambda text: None,
) -> FormatTable:
    """Load every format, compare the answers, and time one run at each size, in turns; the median of the rounds.

    Args:
        draw: random inputs of these sizes.
        is_over: asked after each round of all sizes; at least one round is measured.

    Raises:
        OrtgraphError: no format can be loaded.
    """
    table = FormatTable(sorted(sizes, key=math.prod))
    inputs = [draw(each) for each in table.sizes]
    with contextlib.ExitStack() as stack:
        engines: dict[str, Engine] = {}
        answers: dict[str, list[HostArrays]] = {}
        for entry in formats:
            tell(f"loading {entry.label}")
            try:
                engine = Engine.load(entry.config)
                stack.callback(engine.close)
                answers[entry.label] = [_answer(engine, feeds) for feeds in inputs]
            except OrtgraphError as error:
                table.refused[entry.label] = str(error)
                continue
            if entry.like in answers:
                changed = _difference(answers[entry.like], answers[entry.label])
                if changed > LIKE_TOLERANCE:
                    table.refused[entry.label] = f"its answers differ by {changed:.1e} from those of {entry.like}"
                    continue
            engines[entry.label] = engine
            first = next(iter(engines))
            table.errors[entry.label] = _difference(answers[first], answers[entry.label])
        if not engines:
            raise OrtgraphError(f"no weight format can be loaded: {next(iter(table.refused.values()))}")
        samples: dict[str, list[list[float]]] = {label: [[] for _ in inputs] for label in engines}
        repeats = [
            max(1, min(_MAX_REPEATS, round(_SAMPLE_S / max(min(_run(e, feeds, 2) for e in engines.values()), 1e-7))))
            for feeds in inputs
        ]
        for number in range(rounds):
            tell(f"weight formats: round {number + 1} of {rounds}")
            for row, feeds in enumerate(inputs):
                for label in sorted(engines, reverse=bool(number % 2)):
                    samples[label][row].append(_run(engines[label], feeds, repeats[row]))
            if is_over():
                break
    for label, rows in samples.items():
        table.seconds[label] = [statistics.median(times) for times in rows]
        spreads = [statistics.median(abs(t - statistics.median(times)) for t in times) for times in rows]
        table.noise[label] = max(s / m for s, m in zip(spreads, table.seconds[label], strict=True))
    return table


def _answer(engine: Engine, feeds: Mapping[str, Array]) -> HostArrays:
    """The outputs as doubles, since element types may differ between formats."""
    (answer,) = engine.run_batch([Request(dict(feeds))])
    if isinstance(answer, RequestError):
        raise answer
    dtypes = {spec.name: spec.dtype for spec in engine.signature.outputs}
    return {name: to_float64(array, dtypes[name]) for name, array in answer.items() if not dtypes[name].is_string}


def _run(engine: Engine, feeds: Mapping[str, Array], repeats: int) -> float:
    """Seconds of one run, of so many with `_DEPTH` on their way."""
    start = time.perf_counter()
    left = repeats
    while left:
        now = min(left, _DEPTH)
        started = [engine.begin([Request(dict(feeds))]) for _ in range(now)]
        for batch in started:
            for _, answer in engine.finish(batch):
                if isinstance(answer, RequestError):
                    raise answer
        left -= now
    return (time.perf_counter() - start) / repeats


def _difference(wanted: Sequence[HostArrays], got: Sequence[HostArrays]) -> float:
    """The largest, relative to the largest value of the same output; infinite where outputs, shapes or NaNs differ."""
    worst = 0.0
    for right, answer in zip(wanted, got, strict=True):
        for name, array in right.items():
            if name not in answer or array.shape != answer[name].shape or not np.isfinite(answer[name]).all():
                return math.inf
            if array.size:
                worst = max(worst, float(np.abs(answer[name] - array).max() / max(np.abs(array).max(), 1e-6)))
    return worst


def advise(table: FormatTable, shares: Mapping[Sizes, float]) -> dict[str, Any]:
    """Seconds of the load's mean run by format, the best one, and whether a format for each size pays.

    A mixed choice needs a copy of the weights for each format in it; it is advised only where it beats the best
    single one by more than the noise.
    """
    total = sum(shares.values())
    weights = [shares.get(sizes, 0.0) / total for sizes in table.sizes]
    means = {label: sum(w * t for w, t in zip(weights, times, strict=True)) for label, times in table.seconds.items()}
    best = min(means, key=lambda label: means[label])
    mixed = sum(w * min(times[row] for times in table.seconds.values()) for row, w in enumerate(weights))
    noise = max(0.02, *table.noise.values())
    return {
        "mean_us": {label: round(mean * 1e6, 2) for label, mean in means.items()},
        "best": best,
        "mixed_us": round(mixed * 1e6, 2),
        "mixed_pays": mixed < means[best] * (1 - noise),
        "noise": round(noise, 4),
    }
