"""A result for people (tables that fit 80 columns, one HTML page) and for programs (JSON)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from loadtest.percentiles import Latency
from loadtest.result import Result

# A percentile with fewer samples than this above it says little.
ENOUGH_BEYOND = 10


def to_json(result: Result, **more: Any) -> str:
    """The result's fields and `more`; latencies in milliseconds, NaN (nothing measured) as null."""
    return json.dumps(
        _without_nan({**asdict(result), "passed": result.passed, "notes": notes(result), **more}), indent=2
    )


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return value


def write(folder: str | Path, result: Result, **more: Any) -> Path:
    """`report.html` and `report.json` in a folder, each replaced in one step; the HTML page's path."""
    from loadtest.page import page  # matplotlib is slow to import, and only needed here

    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for name, text in (("report.json", to_json(result, **more) + "\n"), ("report.html", page(result, **more))):
        new = target / f".{name}.new"
        new.write_text(text, encoding="utf-8")
        os.replace(new, target / name)
    return target / "report.html"


def notes(result: Result) -> list[str]:
    """What one must know to read the numbers, in sentences."""
    found = []
    latency, service, generator = result.latency, result.service, result.generator
    if result.loop == "closed":
        found.append(
            "Closed loop: a user sends its next request when it has the answer to its last one. When the server "
            "stalls, the users stop with it, so that the requests that would have come meanwhile were never sent and "
            "their waiting is in no percentile (coordinated omission). To promise a P99 to clients that do not wait "
            "for each other, measure an open loop: --rate."
        )
    else:
        found.append(
            "Open loop: latency counts from the moment at which a request was due, so that a stall counts for every "
            "request that was due in it. Service time counts from when it was sent, which is what a closed loop would "
            f"show: P99 {latency.p99_ms:.2f} ms from when due, {service.p99_ms:.2f} ms from when sent. Requests were "
            f"sent {generator.late_p50_ms:.2f} ms late at P50 and {generator.late_p99_ms:.2f} ms at P99; more than a "
            "millisecond means that all users were busy, or this machine was."
        )
    for name, share in (("P99", 0.01), ("P99.9", 0.001)):
        beyond = math.floor(latency.count * share)
        if latency.count and beyond < ENOUGH_BEYOND:
            found.append(f"{name} rests on {max(beyond, 1)} of {latency.count} answers: measure longer to promise it.")
            break
    found.append(
        f"The load generator used {generator.cpu_cores:.2f} processor cores in {generator.processes} "
        f"process{'es' * (generator.processes > 1)}."
    )
    if ceiling := generator.ceiling:
        found.append(
            f"Against a model that does nothing it reaches {ceiling.throughput_rps:.0f} requests/s with as many users "
            f"(P50 {ceiling.p50_ms:.2f} ms, P99 {ceiling.p99_ms:.2f} ms). That is the ceiling of generator and "
            "network, not of the server."
        )
        if ceiling.cores_at_1000_rps is not None:
            found.append(
                "At 1,000 requests a second in an open loop against that model, the generator uses "
                f"{100 * ceiling.cores_at_1000_rps:.0f} % of one processor core."
            )
        if result.throughput_rps > ceiling.throughput_rps / 2:
            found.append("This run came to more than half of that: use more --processes, or another machine.")
    return found


def show(console: Console, result: Result) -> None:
    """Latency, throughput, failures, the stages, and which buckets served them."""
    title = (
        f"{result.model} over {result.protocol}, {result.loop} loop, {result.users} users, {result.measured_s:.0f} s"
    )
    if result.loop == "closed":
        title = f"{result.model} over {result.protocol}, {result.users} users, {result.measured_s:.0f} s"
    headings = ("p50 ms", "p90 ms", "p99 ms", "p99.9 ms", "max ms", "req/s", "answers", "failures")
    table = _table(title, *headings)
    table.add_row(*_cells(result.latency, result.throughput_rps, sum(result.failures.values())))
    console.print(table)
    for text, number in list(result.failures.items())[:10]:
        console.print(f"  {number} x {text}", style="red", markup=False)
    if len(result.stages) > 1:
        unit = "req/s" if result.loop.startswith("open") else "users"
        steps = _table("stages", "stage", unit, "p50 ms", "p90 ms", "p99 ms", "max ms", "answers/s", "failures")
        steps.columns[0].justify = "left"
        for stage in result.stages:
            cells = _cells(stage.latency, stage.throughput_rps, sum(stage.failures.values()))
            steps.add_row(stage.name, f"{stage.offered:.4g}", *cells[:3], *cells[4:6], cells[7])
        console.print(steps)
        if result.knee is not None:
            console.print(f"knee: {result.knee:.4g} {unit}; beyond it latency grows faster than throughput")
    _show_split(console, result)
    if result.bucket_hits:
        hits = _table("bucket hits", "bucket", "groups", "share")
        hits.columns[0].justify = "left"
        total = sum(result.bucket_hits.values())
        for name, count in result.bucket_hits.items():
            hits.add_row(name, f"{count:.0f}", f"{100 * count / total:.0f} %")
        console.print(hits)
        if result.padding_share is not None:
            console.print(f"padding: {100 * result.padding_share:.0f} % of the input elements that ran")
    elif result.bucket_hits is not None:
        console.print("bucket hits: none (no request fits a bucket, or the model is not served by ortgraph)")
    for check in result.gate:
        if not check.passed or len(result.gate) > 1:
            console.print(
                f"gate: {check.text}: {'kept' if check.passed else 'NOT KEPT'}",
                style="" if check.passed else "bold red",
            )


def _show_split(console: Console, result: Result) -> None:
    """The server's own split of the time, of the last stage."""
    server = result.stages[-1].server if result.stages else None
    if server is None:
        return
    table = _table(
        "mean ms of a request" + (f", {result.stages[-1].name}" if len(result.stages) > 1 else ""),
        *("queue", "compute input", "compute infer", "compute output", "network, client"),
    )
    values = (server.queue_ms, server.compute_input_ms, server.compute_infer_ms, server.compute_output_ms)
    table.add_row(*(milliseconds(value) for value in (*values, server.network_and_client_ms)))
    console.print(table)


def _cells(latency: Latency, throughput_rps: float, failed: int) -> Sequence[str]:
    times = (latency.p50_ms, latency.p90_ms, latency.p99_ms, latency.p99_9_ms, latency.max_ms)
    return [
        *(milliseconds(value_ms) for value_ms in times),
        f"{throughput_rps:.1f}",
        str(latency.count),
        f"[bold red]{failed}[/]" if failed else "0",
    ]


def milliseconds(value_ms: float) -> str:
    """With so many digits as mean something; "-" where nothing was measured."""
    if math.isnan(value_ms):
        return "-"
    return f"{value_ms:.{2 if value_ms < 100 else 1 if value_ms < 1000 else 0}f}"


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1))
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
