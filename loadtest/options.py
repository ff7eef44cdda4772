"""The options of a load test, the same on Locust's command line and on `python -m loadtest`."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

from loadtest.lengths import Lengths

REPOSITORY = Path(__file__).resolve().parent.parent / "model_repository"


@dataclass(frozen=True)
class Options:
    """What to send and how an answer is judged."""

    model: str
    repository: Path
    lengths: Lengths
    texts: Path | None
    requests: int
    tolerance: float | None
    timeout_s: float

    @classmethod
    def of(cls, parsed: argparse.Namespace) -> Options:
        """From what a parser with `add_arguments` gave."""
        return cls(
            model=parsed.model,
            repository=Path(parsed.model_repository),
            lengths=_lengths(parsed.lengths),
            texts=Path(parsed.texts) if parsed.texts else None,
            requests=parsed.requests,
            tolerance=float(parsed.tolerance) if parsed.tolerance not in (None, "") else None,
            timeout_s=parsed.timeout_s,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser; Locust's web UI shows them too."""
    group = parser.add_argument_group("requests to Triton")
    group.add_argument("--model", default="text_embedding", help="the model's name (default: text_embedding)")
    group.add_argument(
        "--model-repository", default=str(REPOSITORY), help="where its model.onnx lies, for the right answers"
    )
    group.add_argument(
        "--lengths", type=_lengths, default="8..128", help="of the dynamic sizes: one (64) or a range (default: 8..128)"
    )
    group.add_argument("--texts", default="", help="send the lines of this file instead of random ids")
    group.add_argument(
        "--requests", type=_positive_int, default=128, help="different requests to draw from (default: 128)"
    )
    group.add_argument(
        "--tolerance", default="", help="relative to the largest expected value (default: by element type)"
    )
    group.add_argument("--timeout-s", type=positive_float, default=60.0, help="for each request (default: 60)")


def positive_float(text: str) -> float:
    """For argparse: a finite number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got '{text}'")
    return value


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, got '{text}'")
    return value


def _lengths(value: str | Lengths) -> Lengths:
    """Locust's web UI hands back the text of what was shown."""
    try:
        return Lengths.parse(str(value))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
