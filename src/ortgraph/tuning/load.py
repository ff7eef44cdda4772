"""The load that a model is tuned for: clients, rows and lengths, and requests drawn from it."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config import ModelConfig
from ..errors import OrtgraphError
from ..preflight import Preflight
from ..providers.base import Array
from ..signature import BATCH, Signature, Sizes
from .inputs import known_sizes

MAX_RANGE = 1_000_000


class TuningError(OrtgraphError):
    """A measurement cannot be made as asked; the one line says what to change."""


@dataclass(frozen=True)
class Load:
    """So many clients with one request each on its way, of `rows` rows; `lengths` holds how often each length comes."""

    clients: int
    rows: int
    lengths: Mapping[int, float]

    def draw(self, rng: random.Random) -> int:
        """One length."""
        return rng.choices(list(self.lengths), list(self.lengths.values()))[0]

    def key(self) -> dict[str, object]:
        """What makes two loads the same, for the file of measurements."""
        return {
            "clients": self.clients,
            "rows": self.rows,
            "lengths": {str(length): count for length, count in sorted(self.lengths.items())},
        }


def parse_lengths(text: str) -> dict[int, float]:
    """`64`, `8..128` (each as often), or a file with a length a line, or a length and how often it comes.

    Raises:
        TuningError: it is none of them.
    """
    match = re.fullmatch(r"\s*([1-9]\d{0,8})(?:\.\.([1-9]\d{0,8}))?\s*", text)
    if match:
        low, high = int(match[1]), int(match[2] or match[1])
        if low > high or high - low > MAX_RANGE:
            raise TuningError(f"--lengths must go from a smaller to a larger size, got '{text}'")
        return dict.fromkeys(range(low, high + 1), 1.0)
    path = Path(text)
    if not path.is_file():
        raise TuningError(
            f"--lengths must be a size (64), a range (8..128) or a file with a length a line, got '{text}'"
        )
    counts: Counter[int] = Counter()
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        found = re.fullmatch(r"\s*([1-9]\d{0,8})(?:[\s,:;]+(\d{1,12}))?\s*", line)
        if not found:
            raise TuningError(f"{path}, line {number}, must be a length, or a length and a count, got '{line[:40]}'")
        counts[int(found[1])] += int(found[2] or 1)
    if not sum(counts.values()):
        raise TuningError(f"{path} holds no lengths")
    return {length: float(count) for length, count in counts.items() if count}


def default_lengths(config: ModelConfig, signature: Signature) -> dict[int, float]:
    """Where none are given: the bucket sizes of the first dimension that is not the batch, each as often; else 32."""
    for name, ladder in config.buckets.items():
        if signature.dims[signature.index(name)].name != BATCH:
            return dict.fromkeys(ladder, 1.0)
    return {32: 1.0}


def request_sizes(config: ModelConfig, signature: Signature, load: Load, length: int) -> Sizes:
    """The sizes of one request: its rows, the sizes that the config fixes, and its length everywhere else."""
    known = known_sizes(config, signature)
    sizes = []
    for place, dim in enumerate(signature.dims):
        is_rows = dim.name == BATCH or (not signature.is_batched and any(axis == 0 for _, axis in dim.axes))
        sizes.append(load.rows if is_rows else known.get(place, length))
    return tuple(sizes)


def batches(
    config: ModelConfig, signature: Signature, load: Load, *, per_batch: int, count: int, seed: int = 0
) -> list[list[dict[str, Array]]]:
    """Batches of requests as the server would get them: random values, lengths drawn from the load."""
    rng = random.Random(seed)
    draw = drawer(config, signature)
    return [
        [draw(request_sizes(config, signature, load, load.draw(rng))) for _ in range(per_batch)] for _ in range(count)
    ]


def drawer(config: ModelConfig, signature: Signature) -> Callable[[Sizes], dict[str, Array]]:
    """Random inputs of given sizes, as the proof before ready draws them."""
    return Preflight(signature, lambda inputs: {}, {}, {}, config.value_ranges).random_inputs


def spread(lengths: Iterable[int], count: int) -> Sequence[int]:
    """At most so many of these lengths: quantiles, the largest among them."""
    ordered = sorted(lengths)
    if len(ordered) <= count:
        return ordered
    return sorted({ordered[-(-(i + 1) * len(ordered) // count) - 1] for i in range(count)})
