"""Tables in documents, made from the committed results so that no number is typed by hand.

A document holds `<!-- table: benchmarks/results/NAME.json -->` and `<!-- end of table -->`; what lies between is
written by `python -m benchmarks document`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import QUIET_CORES

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = (ROOT / "README.md",)
_PLACE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.S)


def render(text: str) -> str:
    """A document with every table made anew."""
    return _PLACE.sub(lambda found: found[1] + table(json.loads((ROOT / found[2]).read_text())) + found[3], text)


def table(result: Mapping[str, Any]) -> str:
    """A result as Markdown: a row for each load and target, and where the numbers are from."""
    first = result["rows"][0]["target"]
    lines = [
        "",
        f"| clients, lengths | served by | requests/s | p50 ms | p99 ms | requests/s against {first} |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        clients, lengths = row["load"].split(":", 1)
        latency, ratio = row["latency"], row["throughput_ratio"]
        against = (
            "1" if row["target"] == first else f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
        )
        cells = (f"{clients}, {lengths}", row["target"], f"{row['throughput_rps']:.0f}")
        times = (f"{latency['p50_ms']:.1f}", f"{latency['p99_ms']:.1f}")
        lines.append(f"| {' | '.join((*cells, *times, against))} |")
    hardware, versions = result["hardware"], result["versions"]
    machine = ", ".join([f"{hardware['cores']} cores of {hardware['cpu']}", *hardware["gpus"]])
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines += ["", f"`{result['command']}`, {result['date']}, on {machine}; {software}.{_noise(result)}", ""]
    return "\n".join(lines)


def _noise(result: Mapping[str, Any]) -> str:
    """What else ran, where the result knows it and it is not little."""
    cores = max(row.get("other_cpu_cores", 0.0) for row in result["rows"])
    return f" Other processes used up to {cores:.1f} cores meanwhile." if cores > QUIET_CORES else ""


def write() -> list[Path]:
    """Rewrite the documents; those that changed."""
    changed = []
    for path in DOCUMENTS:
        old = path.read_text()
        new = render(old)
        if new != old:
            path.write_text(new)
            changed.append(path)
    return changed
