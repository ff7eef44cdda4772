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
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "gpu.md")
_PLACE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.S)


def render(text: str) -> str:
    """A document with every table made anew."""
    return _PLACE.sub(lambda found: found[1] + table(json.loads((ROOT / found[2]).read_text())) + found[3], text)


def table(result: Mapping[str, Any]) -> str:
    """A result as Markdown, and where the numbers are from."""
    kinds = {"figure": _figures, "load": _compared, "variant": _by_size, "m": _by_m}
    lines = next(make for key, make in kinds.items() if key in result["rows"][0])(result)
    hardware, versions = result["hardware"], result["versions"]
    machine = ", ".join([f"{hardware['cores']} cores of {hardware['cpu']}", *hardware["gpus"]])
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines += ["", f"`{result['command']}`, {result['date']}, on {machine}; {software}.{_noise(result)}", ""]
    return "\n".join(["", *lines])


def _compared(result: Mapping[str, Any]) -> list[str]:
    """A row for each load and target of a comparison of servers."""
    first = result["rows"][0]["target"]
    lines = [
        f"| clients, lengths | served by | requests/s | p50 ms | p99 ms | rps against {first} | p99 against it |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        clients, lengths = row["load"].split(":", 1)
        latency, ratio, p99 = row["latency"], row["throughput_ratio"], row["p99_ratio"]
        against = ["1", "1"]
        if row["target"] != first:
            spread = f" ({ratio['low']:.2f} to {ratio['high']:.2f})" if ratio["low"] != ratio["high"] else ""
            against = [f"{ratio['median']:.2f}{spread}", f"{p99['median']:.2f}"]
        cells = (f"{clients}, {lengths}", row["target"], f"{row['throughput_rps']:.0f}")
        times = (f"{latency['p50_ms']:.1f}", f"{latency['p99_ms']:.1f}")
        lines.append(f"| {' | '.join((*cells, *times, *against))} |")
    return lines


def _by_size(result: Mapping[str, Any]) -> list[str]:
    """A row for each size of a model run in one process, the variants side by side."""
    rows = result["rows"]
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    lines = [f"| size | {' | '.join(f'{name}: p50, p99 us' for name in variants)} | {variants[0]} / {variants[-1]} |"]
    lines.append("|---" * (len(variants) + 2) + "|")
    for size in dict.fromkeys(row["size"] for row in rows):
        of_size = {row["variant"]: row for row in rows if row["size"] == size}
        cells = [f"{of_size[name]['median_us']:.0f}, {of_size[name]['p99_us']:.0f}" for name in variants]
        ratio = of_size[variants[0]]["median_us"] / of_size[variants[-1]]["median_us"]
        lines.append(f"| {' | '.join([size, *cells, f'{ratio:.2f}'])} |")
    worst = max(row["worst_error"] for row in rows)
    return [*lines, "", f"Largest difference from the CPU's answers, relative to their largest value: {worst:.0e}."]


def _by_m(result: Mapping[str, Any]) -> list[str]:
    """A row for each number of rows of the weight formats."""
    names = list(result["rows"][0]["us"])
    lines = [f"| M | {' | '.join(f'{name} us' for name in names)} | fastest |", "|---" * (len(names) + 2) + "|"]
    for row in result["rows"]:
        times = [f"{row['us'][name]:.0f}" for name in names]
        lines.append(f"| {' | '.join([str(row['m']), *times, min(row['us'], key=row['us'].__getitem__)])} |")
    return lines


def _figures(result: Mapping[str, Any]) -> list[str]:
    """A row for each figure that was asked for."""
    lines = ["| figure | asked | measured | reached |", "|---|---|---|---|"]
    for row in result["rows"]:
        cells = (row["figure"], row["asked"], row["measured"], {True: "yes", False: "no", None: ""}[row["is_reached"]])
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _noise(result: Mapping[str, Any]) -> str:
    """Rounds that are missing, and what else ran where the result knows it and it is not little."""
    plan = result.get("plan", {})
    rounds = plan.get("rounds", 0)
    if (finished := plan.get("finished_rounds", rounds)) < rounds:
        return f" Ended after round {finished}."
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
