"""A result for people (tables that fit 80 columns) and for programs (JSON)."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from loadtest.runner import Result


def to_json(result: Result) -> str:
    """The result's fields; latencies in milliseconds, NaN (no right answer at all) as null."""
    fields = asdict(result)
    fields["latency"] = {name: value if value == value else None for name, value in fields["latency"].items()}
    return json.dumps(fields, indent=2)


def show(console: Console, result: Result) -> None:
    """Latency, throughput, failures, and which buckets served them."""
    title = f"{result.model} over {result.protocol}, {result.users} users, {result.duration_s:.0f} s"
    table = _table(title, "p50 ms", "p90 ms", "p99 ms", "max ms", "requests/s", "answers", "failures")
    latency, failed = result.latency, sum(result.failures.values())
    table.add_row(
        *(f"{value_ms:.2f}" for value_ms in (latency.p50_ms, latency.p90_ms, latency.p99_ms, latency.max_ms)),
        f"{result.throughput_rps:.1f}",
        str(latency.count),
        f"[bold red]{failed}[/]" if failed else "0",
    )
    console.print(table)
    for text, number in sorted(result.failures.items(), key=lambda item: -item[1])[:10]:
        console.print(f"  {number} x {text}", style="red", markup=False)
    if result.bucket_hits:
        hits = _table("bucket hits", "bucket", "groups", "share")
        hits.columns[0].justify = "left"
        total = sum(result.bucket_hits.values())
        for name, count in result.bucket_hits.items():
            hits.add_row(name, f"{count:.0f}", f"{100 * count / total:.0f} %")
        console.print(hits)
    elif result.bucket_hits is not None:
        console.print("bucket hits: none (the model has no buckets, or is not served by ortgraph)")


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1))
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
