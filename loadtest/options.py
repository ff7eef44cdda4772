"""The options of a load test, the same on Locust's command line, in its web UI and on `python -m loadtest`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.lengths import Lengths
from loadtest.stages import SHAPES, Stage, stages

REPOSITORY = Path(__file__).resolve().parent.parent / "model_repository"
ARRIVALS = ("poisson", "constant")


@dataclass(frozen=True)
class Requests:
    """What is sent and how an answer is judged; a pool of samples is built once for each."""

    model: str
    repository: Path
    lengths: Lengths
    rows: int
    texts: Path | None
    images: Path | None
    count: int
    is_noop: bool

    @classmethod
    def of(cls, parsed: argparse.Namespace) -> Requests:
        """From what a parser with `add_arguments` gave."""
        return cls(
            model=parsed.model,
            repository=Path(parsed.model_repository),
            lengths=Lengths.parse(parsed.lengths),
            rows=parsed.rows,
            texts=Path(parsed.texts) if parsed.texts else None,
            images=Path(parsed.images) if parsed.images else None,
            count=parsed.requests,
            is_noop=parsed.is_noop,
        )


def tolerance(parsed: argparse.Namespace) -> float | None:
    """Relative; None is the element type's own. Locust's web UI hands back text."""
    return None if parsed.tolerance in (None, "") else float(parsed.tolerance)


def plan(parsed: argparse.Namespace, users: int) -> list[Stage]:
    """The stages that the options ask for: requests a second with `rate`, else `users`."""
    is_open = parsed.rate > 0
    return stages(
        parsed.shape,
        parsed.rate if is_open else users,
        duration_s=parsed.duration_s,
        warmup_s=parsed.warmup_s,
        steps=parsed.steps,
        spike=parsed.spike,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser; Locust's web UI shows them too."""
    group = parser.add_argument_group("requests to Triton")
    add = group.add_argument
    add("--model", default="text_embedding", help="the model's name (default: text_embedding)")
    add("--model-repository", default=str(REPOSITORY), help="where its model.onnx lies, for the right answers")
    add(
        "--lengths",
        type=_lengths,
        default="8..128",
        help="of the dynamic sizes: 64, 8..128, zipf:8..512, zipf1.5:8..512 or file:PATH (default: 8..128)",
    )
    add("--rows", type=positive_int, default=1, help="of each request (default: 1)")
    add("--texts", default="", help="send the lines of this file instead of random ids")
    add("--images", default="", help="send the images of this folder instead of random values")
    add("--requests", type=positive_int, default=128, help="different requests to draw from (default: 128)")
    add("--tolerance", default="", help="relative to the largest expected value (default: by element type)")
    add("--timeout-s", type=positive_float, default=60.0, help="for each request (default: 60)")
    add("--is-noop", action="store_true", help=argparse.SUPPRESS)  # zeros are right: the generator's own ceiling
    group = parser.add_argument_group("load")
    add = group.add_argument
    add(
        "--rate",
        type=non_negative_float,
        default=0.0,
        help="open loop: requests a second, whatever the server does; 0: closed loop",
    )
    add("--arrivals", choices=ARRIVALS, default="poisson", help="of the open loop (default: poisson)")
    add("--shape", choices=SHAPES, default="flat", help="flat, steps up to the full load, a spike, or a soak")
    add("--duration-s", type=positive_float, default=10.0, help="measured, all stages together (default: 10)")
    add(
        "--warmup-s",
        type=non_negative_float,
        default=1.0,
        help="not counted, at the start and of each step (default: 1)",
    )
    add("--steps", type=positive_int, default=8, help="of the shape 'steps' (default: 8)")
    add("--spike", type=positive_float, default=3.0, help="the spike is so many times the load (default: 3)")
    add("--seed", type=int, default=0, help="of arrivals and inputs (default: 0)")
    group = parser.add_argument_group("report and gate")
    add = group.add_argument
    add("--report", default="", help="folder for report.html and report.json")
    add("--metrics-url", default=None, help="Triton's metrics (default: port 8002 of the same host); '' for none")
    add("--p99-ms", type=positive_float, default=None, help="exit code 1 when the P99 is above")
    add("--min-rps", type=positive_float, default=None, help="exit code 1 when fewer right answers a second came")
    add("--max-failures", type=_count, default=0, help="exit code 1 when more requests failed (default: 0)")


def _checked(kind: Callable[[str], Any], is_right: Callable[[Any], bool], rule: str) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not is_right(value):
            raise argparse.ArgumentTypeError(f"must be {rule}, got '{text}'")
        return value

    return convert


positive_float = _checked(float, lambda value: 0 < value < math.inf, "a number above 0")
non_negative_float = _checked(float, lambda value: 0 <= value < math.inf, "a number from 0")
positive_int = _checked(int, lambda value: value >= 1, "a whole number from 1")
_count = _checked(int, lambda value: value >= 0, "a whole number from 0")


def _lengths(text: str) -> str:
    """Checked, but kept as text: Locust shows it in its web UI and sends it to its workers."""
    try:
        return str(Lengths.parse(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
