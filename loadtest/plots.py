"""The report's plots, each drawn twice: for a light page and for a dark one."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from loadtest.result import Result

SIZE_IN = (9.0, 3.6)


@dataclass(frozen=True)
class Theme:
    """Colours of one kind of page; `series` keep their contrast on it and differ for colour-blind readers too."""

    text: str
    grid: str
    shade: str
    series: Sequence[str]


LIGHT = Theme("#1f2328", "#d8dce1", "#eceff2", ("#0b62b8", "#c2410c", "#18794e", "#8b5cf6", "#9a6700"))
DARK = Theme("#e6e8eb", "#3a4047", "#262b31", ("#6cb6ff", "#ff9b5e", "#57c785", "#c4a7ff", "#e3b341"))
SPLIT = {
    "queue": "queue_ms",
    "compute input": "compute_input_ms",
    "compute infer": "compute_infer_ms",
    "compute output": "compute_output_ms",
    "network and client": "network_and_client_ms",
}

Draw = Callable[[Any, Theme, Result], None]


def plots(result: Result) -> Mapping[str, Draw]:
    """What there is to draw of a result, by title."""
    found: dict[str, Draw] = {}
    if len({stage.offered for stage in result.stages}) >= 3:
        found["Latency against offered load"] = load_curve
    found["Latency by percentile"] = spectrum
    found["Latency over time"] = over_time
    if any(stage.server for stage in result.stages):
        found["Where the time goes"] = split
    if result.bucket_hits:
        found["Bucket hits"] = buckets
    if result.gpus:
        found["GPU utilization"] = gpus
    return found


def figure(draw: Draw, result: Result, theme: Theme) -> Figure:
    """One plot on a transparent ground."""
    colours = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), theme.text)
    style: Any = {
        **colours,
        "axes.edgecolor": theme.grid,
        "grid.color": theme.grid,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "font.size": 10,
        "lines.linewidth": 1.8,
    }
    with matplotlib.rc_context(style):
        drawn = Figure(figsize=SIZE_IN, layout="constrained")
        axes = drawn.subplots()
        axes.set_axisbelow(True)
        draw(axes, theme, result)
        drawn.patch.set_alpha(0)
        axes.patch.set_alpha(0)
        return drawn


def svg_uri(draw: Draw, result: Result, theme: Theme) -> str:
    """A plot as a data URI."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "ortgraph"}):
        figure(draw, result, theme).savefig(buffer, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def load_curve(axes: Any, theme: Theme, result: Result) -> None:
    """P50 and P99 of each step, and the knee."""
    offered = [stage.offered for stage in result.stages]
    for colour, (label, values) in zip(
        theme.series,
        {
            "P50": [stage.latency.p50_ms for stage in result.stages],
            "P99": [stage.latency.p99_ms for stage in result.stages],
        }.items(),
        strict=False,
    ):
        axes.plot(offered, values, "o-", color=colour, label=label, markersize=5)
    if result.knee is not None:
        axes.axvline(result.knee, color=theme.series[2], linestyle="--", linewidth=1.4)
        axes.annotate(
            f"knee at {result.knee:.4g}", (result.knee, 1), xycoords=("data", "axes fraction"), xytext=(5, -12),
            textcoords="offset points", color=theme.series[2],
        )  # fmt: skip
    unit = "requests/s" if result.loop.startswith("open") else "users"
    axes.set_xlabel(f"offered load, {unit}")
    axes.set_xlim(left=0)
    _latency_axis(axes)
    axes.legend()


def spectrum(axes: Any, theme: Theme, result: Result) -> None:
    """Latency and service time against the share of requests that are slower."""
    percents = [point.percent for point in result.spectrum]
    slower = [100 / (100 - percent) for percent in percents]
    axes.plot(slower, [p.latency_ms for p in result.spectrum], color=theme.series[0], label="latency (from when due)")
    if result.loop.startswith("open"):
        service = [p.service_ms for p in result.spectrum]
        axes.plot(slower, service, color=theme.series[1], linestyle="--", label="service (from when sent)")
        axes.legend()
    axes.set_xscale("log")
    ticks = [percent for percent in (50, 90, 99, 99.9, 99.99) if 100 / (100 - percent) <= max(slower, default=1) * 1.01]
    axes.set_xticks([100 / (100 - percent) for percent in ticks], [f"P{percent:g}" for percent in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(f"percentile of {result.latency.count} right answers")
    _latency_axis(axes)


def over_time(axes: Any, theme: Theme, result: Result) -> None:
    """Each second's P50, P99 and longest; stages are shaded in turn, failures marked."""
    times = [second.time_s + 0.5 for second in result.timeline]
    for colour, style, label, name in (
        (theme.series[3], ":", "longest", "max_ms"),
        (theme.series[1], "-", "P99", "p99_ms"),
        (theme.series[0], "-", "P50", "p50_ms"),
    ):
        axes.plot(times, [getattr(second, name) for second in result.timeline], style, color=colour, label=label)
    failed = [second.time_s + 0.5 for second in result.timeline if second.failures]
    if failed:
        axes.plot(
            failed, [0.03] * len(failed), "x", color=theme.series[4], label="failures",
            transform=axes.get_xaxis_transform(),
        )  # fmt: skip
    if len(result.stages) > 1:
        for stage in result.stages[::2]:
            axes.axvspan(stage.start_s, stage.start_s + stage.measured_s, color=theme.shade, zorder=0)
    axes.set_xlabel("seconds from the start")
    axes.set_xlim(0, max(times, default=1) + 0.5)
    _latency_axis(axes)
    axes.legend(ncols=4, loc="lower right", bbox_to_anchor=(1, 1))


def split(axes: Any, theme: Theme, result: Result) -> None:
    """The mean time of a request in each stage, in perf_analyzer's parts."""
    shown = [(stage, stage.server) for stage in result.stages if stage.server]
    names = [f"{stage.name} ({stage.offered:.4g})" if len(shown) > 1 else "" for stage, _ in shown]
    left = [0.0] * len(shown)
    for colour, (label, name) in zip(theme.series, SPLIT.items(), strict=True):
        widths = [getattr(server, name) for _, server in shown]
        axes.barh(names, widths, left=left, color=colour, label=label, height=0.62)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.grid(axis="x")
    axes.set_xlabel("mean ms of a request")
    axes.legend(ncols=5, loc="lower right", bbox_to_anchor=(1, 1), columnspacing=1.0, handlelength=1.0)


def buckets(axes: Any, theme: Theme, result: Result) -> None:
    """How many groups ran in each bucket, the most used first."""
    hits = list((result.bucket_hits or {}).items())[:12]
    axes.barh([name for name, _ in hits], [count for _, count in hits], color=theme.series[0], height=0.62)
    axes.invert_yaxis()
    axes.grid(axis="x")
    axes.set_xlabel("groups")


def gpus(axes: Any, theme: Theme, result: Result) -> None:
    """Utilization of each GPU once a second."""
    names = list(dict.fromkeys(reading.gpu for reading in result.gpus))
    for number, name in enumerate(names):
        own = [reading for reading in result.gpus if reading.gpu == name]
        colour = theme.series[number % len(theme.series)]
        axes.plot([r.time_s for r in own], [100 * r.utilization for r in own], color=colour, label=name)
    axes.set_ylim(0, 100)
    axes.set_ylabel("%")
    axes.set_xlabel("seconds from the start")
    axes.grid()
    axes.legend()


def _latency_axis(axes: Any) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    low, high = axes.get_ylim()
    is_narrow = high < 10 * low
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}") if is_narrow else NullFormatter())
    axes.tick_params(which="minor", labelsize=8)
    axes.set_ylabel("ms")
    axes.grid(which="major")
