"""How long requests are: one size, a distribution between two, or sizes that were seen; texts are in samples.py."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path

_FORM = re.compile(r"(?:zipf(?P<exponent>\d+(?:\.\d+)?)?:)?(?P<low>[1-9]\d{0,5})(?:\.\.(?P<high>[1-9]\d{0,5}))?")
_RULE = "lengths must be a size (64), a range (8..128), zipf:8..128, zipf1.5:8..128 or file:PATH"


@dataclass(frozen=True)
class Lengths:
    """Sizes from `low` to `high`, both included; the k-th smallest has the weight k ** -exponent (0 is uniform).

    With `path`, sizes are drawn from those in that file instead, one a line, each line equally often.
    """

    low: int
    high: int
    exponent: float = 0.0
    path: str = ""
    seen: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """`64`, `8..128` (uniform), `zipf:8..128` (exponent 1), `zipf1.5:8..128`, `file:lengths.txt`.

        Raises:
            ValueError: it is none of them, the range is empty, or the file has no sizes.
        """
        text = text.strip()
        if text.startswith("file:"):
            return cls._read(text.removeprefix("file:"))
        match = _FORM.fullmatch(text)
        low, high = (int(match["low"]), int(match["high"] or match["low"])) if match else (1, 0)
        if match is None or low > high:
            raise ValueError(f"{_RULE}, got '{text}'")
        return cls(low, high, float(match["exponent"] or 1.0) if text.startswith("zipf") else 0.0)

    @classmethod
    def _read(cls, path: str) -> Lengths:
        try:
            words = Path(path).read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"the lengths file {path} cannot be read: {error}") from error
        wrong = next((word for word in words if not re.fullmatch(r"[1-9]\d{0,5}", word)), None)
        if wrong or not words:
            raise ValueError(f"{path} must hold one size a line, got {repr(wrong) if wrong else 'nothing'}")
        sizes = tuple(map(int, words))
        return cls(min(sizes), max(sizes), path=path, seen=sizes)

    def draw(self, rng: random.Random) -> int:
        """One size."""
        if self.seen:
            return rng.choice(self.seen)
        if not self.exponent:
            return rng.randint(self.low, self.high)
        sizes = range(self.low, self.high + 1)
        return rng.choices(sizes, [(1 + i) ** -self.exponent for i in range(len(sizes))])[0]

    def __str__(self) -> str:
        if self.path:
            return f"file:{self.path}"
        if self.exponent:
            return f"zipf{self.exponent:g}:{self.low}..{self.high}"
        return str(self.low) if self.low == self.high else f"{self.low}..{self.high}"
