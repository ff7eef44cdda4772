"""A result as tables on the terminal and as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.rounds import Plan, Slice
from benchmarks.summary import Row, Spread
from loadtest.percentiles import Latency

# More than this in other processes, and a comparison on a few cores is no longer one.
QUIET_CORES = 0.1
RESULTS = Path(__file__).resolve().parent / "results"


def show(console: Console, rows: Sequence[Row], base: str) -> None:
    """For each load what was measured, and the ratios to the target `base`. Fits 80 columns."""
    for load in dict.fromkeys(row.load for row in rows):
        clients, lengths = load.split(":", 1)
        title = f"{clients} client{'s' * (clients != '1')}, lengths {lengths}"
        own = [row for row in rows if row.load == load]
        console.print(_measured(title, own))
        console.print(_ratios(f"{title}: ratio to {base} (lowest to highest round)", own, base))
        for row in own:
            console.print(
                f"  {row.target}: processor cores used by the server {row.server_cpu_cores:.2f}, "
                f"by the load client {row.loader_cpu_cores:.2f}"
            )
            for text, count in row.failures.items():
                console.print(f"  {row.target}: {count} x {text}", style="red", markup=False)
            if row.bucket_hits:
                hits = "; ".join(f"{name}: {count:.0f}" for name, count in list(row.bucket_hits.items())[:8])
                console.print(f"  {row.target}: bucket hits {hits}", markup=False)
    console.print(
        "req/s is the median of the rounds, ratios too; percentiles are those of all rounds' samples together.\n"
        f"The idle servers used {max(row.idle_cpu_cores for row in rows):.2f} cores at most, "
        f"what is not part of this benchmark {(other := max(row.other_cpu_cores for row in rows)):.2f}."
    )
    if other > QUIET_CORES:
        console.print("The machine was not quiet: repeat this before a number is believed.", style="yellow")


def _measured(title: str, rows: Sequence[Row]) -> Table:
    table = _table(title, "req/s", "p50 ms", "p90 ms", "p99 ms", "samples", "failed")
    for row in rows:
        failed = sum(row.failures.values())
        table.add_row(
            row.target,
            f"{row.throughput_rps:.1f}",
            *(f"{value_ms:.2f}" for value_ms in (row.latency.p50_ms, row.latency.p90_ms, row.latency.p99_ms)),
            str(row.latency.count),
            f"[bold red]{failed}[/]" if failed else "0",
        )
    return table


def _ratios(title: str, rows: Sequence[Row], base: str) -> Table:
    table = _table(title, "req/s", "p50", "p99")
    for row in rows:
        if row.target != base:
            table.add_row(row.target, *map(_ratio, (row.throughput_ratio, row.p50_ratio, row.p99_ratio)))
    return table


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column("target", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _ratio(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})"


def save(
    path: Path, *, machine: dict[str, object], model: str, plan: Plan, rows: Sequence[Row], slices: Sequence[Slice]
) -> None:
    """Write the summary and, round by round, what it was made from (without single samples)."""
    result: dict[str, Any] = {
        **machine,
        "model": model,
        "plan": {
            "loads": [str(load) for load in plan.loads],
            "rounds": plan.rounds,
            "finished_rounds": len({part.round for part in slices}),
            "slice_s": plan.slice_s,
            "warmup_s": plan.warmup_s,
            "arrangement": "one server a target, all running, one under load at a time, order reversed every round",
        },
        "rows": [asdict(row) for row in rows],
        "rounds": [_slice(part) for part in slices],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text(json.dumps(result, indent=2) + "\n")
    os.replace(new, path)


def _slice(part: Slice) -> dict[str, Any]:
    return {
        "target": part.target,
        "load": part.load,
        "round": part.round,
        "throughput_rps": len(part.measured.latencies_ms) / part.measured.measured_s,
        "latency": asdict(Latency.of(part.measured.latencies_ms)),
        "failures": part.measured.failures,
        "other_cpu_cores": part.other_cpu_s / part.measured.elapsed_s,
    }
