"""How long requests are: one size for all, uniform between two, or those of real texts (samples.py)."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Lengths:
    """Sizes drawn uniformly from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """`64` or `8..128`.

        Raises:
            ValueError: it is neither, or the range is empty.
        """
        match = re.fullmatch(r"([1-9]\d{0,5})(?:\.\.([1-9]\d{0,5}))?", text.strip())
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if low > high:
            raise ValueError(f"lengths must be a size (64) or a range (8..128), got '{text}'")
        return cls(low, high)

    def draw(self, rng: random.Random) -> int:
        """One size."""
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}..{self.high}"
