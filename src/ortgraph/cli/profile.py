"""`ortgraph profile`: where a model's time goes, by operator and by node, from ONNX Runtime's own profiler."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..config import ModelConfig
from ..dtypes import as_storage
from ..errors import ConfigError, RunError
from ..providers.base import Array
from ..signature import Signature
from ..tuning import inputs as generated
from ..tuning import traced
from ..tuning.trace import NodeTime, Profile, summarise
from .console import console
from .files import CommandError, new_file, reported
from .progress import progress_bar
from .target import has_nvidia_gpu, parse_sizes, read_target

MAX_EVENTS = 900_000  # ONNX Runtime's profiler stops at a million
MAX_ELEMENTS = 2**28  # of a generated input
_SHOWN = 12
_CHARTS = (".png", ".svg")


def profile(
    model: Annotated[Path, typer.Argument(help="An ONNX file, or a model directory with its config.pbtxt.")],
    sizes: Annotated[str, typer.Option(help="Sizes of dynamic dimensions, by name or by input and axis.")] = "",
    runs: Annotated[int, typer.Option(min=1, max=100_000, help="Runs after the first one.")] = 20,
    provider: Annotated[
        str, typer.Option(help="auto, cpu, cuda or webgpu; auto is the config's, else a GPU.")
    ] = "auto",
    inputs: Annotated[Path | None, typer.Option(help="An .npz file with an array for each input.")] = None,
    chart: Annotated[Path | None, typer.Option(help="Write a chart to this .png or .svg file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a chart that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show where the time goes. Example: ortgraph profile model.onnx --sizes "batch=8; x[3]=64" --chart time.png"""
    with reported(), contextlib.ExitStack() as files:
        if chart is not None and chart.suffix not in _CHARTS:
            raise CommandError(f"--chart must end in {' or '.join(_CHARTS)}, got '{chart}'")
        chart_file = files.enter_context(new_file(chart, force=force)) if chart is not None else None
        target = read_target(model)
        config = replace(target.settings, execution_provider=_choose(provider, target.settings))
        given = _read_npz(inputs) if inputs is not None else None
        if given is not None and sizes:
            raise CommandError("--sizes and --inputs exclude each other: the file's arrays have their sizes")
        found, feeds = _measure(config, parse_sizes(sizes), given, runs)
        report = {
            "model": str(model),
            "provider": config.execution_provider,
            "inputs": {name: list(array.shape) for name, array in feeds.items()},
            "runs": len(found.profile.steady_ms),
            **_as_json(found),
        }
        if chart_file is not None:
            _draw(chart_file, target.name, report, found.profile)
        if as_json:
            print(json.dumps(report))
        else:
            _show(target.name, report, found.profile)


@dataclass(frozen=True)
class _Found:
    """The trace, and the milliseconds of steady runs without the profiler."""

    profile: Profile
    plain_ms: float


def _choose(asked: str, config: ModelConfig) -> str:
    if asked not in ("auto", "cpu", "cuda", "webgpu"):
        raise CommandError(f"--provider must be auto, cpu, cuda or webgpu, got '{asked}'")
    if asked != "auto":
        return asked
    if config.execution_provider != "auto":
        return config.execution_provider
    return "cuda" if has_nvidia_gpu() and config.instance_kind == "GPU" else "cpu"


def _read_npz(path: Path) -> dict[str, Array]:
    if not path.is_file():
        raise CommandError(f"there is no file {path}")
    try:
        with np.load(path) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (ValueError, OSError, AttributeError) as error:
        raise CommandError(f"{path} is not an .npz file of plain arrays") from error


def _measure(
    config: ModelConfig, sizes: Mapping[str, int], given: Mapping[str, Any] | None, runs: int
) -> tuple[_Found, dict[str, Array]]:
    """Runs without the profiler, then the same with it in a new session, on CUDA once more with waits."""
    is_cuda = config.execution_provider == "cuda"
    with progress_bar() as progress, tempfile.TemporaryDirectory() as folder:
        task = progress.add_task("loading", total=(3 if is_cuda else 2) * (runs + 1))
        try:
            plain = traced.open_plain(config, tuple(sizes))
        except ConfigError as error:
            raise CommandError(str(error).replace("parameter 'buckets'", "--sizes")) from error
        feeds = _given(plain.signature, given) if given is not None else _generated(config, plain, sizes)
        plain.run(feeds)
        progress.update(task, description="running without the profiler", advance=1)
        plain_ms = []
        for _ in range(runs):
            start = time.perf_counter()
            plain.run(feeds)
            plain_ms.append((time.perf_counter() - start) * 1e3)
            progress.advance(task)
        del plain
        progress.update(task, description="running with the profiler")
        events = traced.trace(config, tuple(sizes), feeds, runs + 1, Path(folder), lambda: progress.advance(task))
        waited = None
        if is_cuda:
            progress.update(task, description="running with the profiler, each kernel waited for")
            waited = traced.trace_waiting(config, tuple(sizes), feeds, runs + 1, Path(folder))
    if len(events) > MAX_EVENTS:
        raise CommandError(f"{runs} runs are more than ONNX Runtime's profiler can hold; give fewer --runs")
    return _Found(summarise(events, waited), statistics.median(plain_ms)), feeds


def _given(signature: Signature, arrays: Mapping[str, Any]) -> dict[str, Array]:
    known = {spec.name: spec for spec in signature.inputs}
    for name in arrays:
        if name not in known:
            raise CommandError(f"--inputs has '{name}', which is not an input; the inputs are {', '.join(known)}")
    missing = [name for name, spec in known.items() if spec.is_required and name not in arrays]
    if missing:
        raise CommandError(f"--inputs has no array for the input '{missing[0]}'")
    return {name: as_storage(name, array, known[name].dtype) for name, array in arrays.items()}


def _generated(config: ModelConfig, opened: traced.PlainSession, sizes: Mapping[str, int]) -> dict[str, Array]:
    problem: RunError | None = None
    for tried in generated.first_sizes(config, opened.signature, sizes):
        for spec in opened.signature.inputs:
            count = math.prod(opened.signature.shape(spec, tried))
            if count > MAX_ELEMENTS:
                raise CommandError(f"input '{spec.name}' would have {count:,} elements; give smaller --sizes")
        feeds = generated.random_inputs(config, opened.signature, opened.run, tried)
        try:
            opened.run(feeds)
            return feeds
        except RunError as error:
            problem = problem or error
    raise CommandError(f"the model does not run on generated inputs ({problem}); give --sizes or --inputs")


def _as_json(found: _Found) -> dict[str, Any]:
    profile = found.profile

    def rows(times: Any) -> list[dict[str, Any]]:
        return [{key: round(v, 4) if isinstance(v, float) else v for key, v in asdict(t).items()} for t in times]

    return {
        "load_ms": round(profile.load_ms, 2),
        "first_ms": round(profile.first_ms, 3),
        "steady_ms": round(profile.median_ms, 3),
        "steady_without_profiler_ms": round(found.plain_ms, 3),
        "outside_nodes_ms": round(profile.outside_ms, 3),
        "placed": _placed(profile),
        "copies": {name: round(ms, 4) for name, ms in profile.copies.items()},
        "operators": rows(profile.operators),
        "nodes": rows(profile.nodes),
    }


def _placed(traced: Profile) -> dict[str, dict[str, Any]]:
    """By provider: nodes, the host's time in them, and the device's where it is traced."""
    found: dict[str, dict[str, Any]] = {}
    for node in traced.nodes:
        entry = found.setdefault(node.provider, {"nodes": 0, "host_ms": 0.0, "device_ms": None})
        entry["nodes"] += 1
        entry["host_ms"] = round(entry["host_ms"] + node.host_ms, 4)
        if node.device_ms is not None:
            entry["device_ms"] = round((entry["device_ms"] or 0.0) + node.device_ms, 4)
    return found


def _show(name: str, report: Mapping[str, Any], traced: Profile) -> None:
    shapes = ", ".join(f"{key} {shape}" for key, shape in report["inputs"].items())
    console.print(f"{name} on {report['provider']}: {shapes}", markup=False)
    console.print(
        f"load {report['load_ms']:.0f} ms, first run {report['first_ms']:.2f} ms, then {report['steady_ms']:.2f} ms "
        f"a run (median of {report['runs']}), {report['outside_nodes_ms']:.2f} ms of it outside the nodes; "
        f"{report['steady_without_profiler_ms']:.2f} ms a run without the profiler"
    )
    for provider, entry in report["placed"].items():
        device = f", {entry['device_ms']:.2f} ms with the device's part" if entry["device_ms"] is not None else ""
        console.print(f"on {provider}: {entry['nodes']} nodes, {entry['host_ms']:.2f} ms of the host{device}")
    for copy, ms in report["copies"].items():
        console.print(f"copy {copy}: {ms:.3f} ms", markup=False)
    if not report["copies"]:
        console.print("no copies between host and device")
    console.print(_table("operator", traced.operators, traced))
    console.print(_table("node", traced.nodes, traced))


def _table(kind: str, times: Any, traced: Profile) -> Table:
    has_device = any(time.device_ms is not None for time in times)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column(kind, overflow="fold")
    table.add_column("nodes" if kind == "operator" else "operator", justify="right" if kind == "operator" else "left")
    for heading in ("on", "ms a run", *(["host ms"] if has_device else []), "share", "first ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    total = sum(time.ms for time in traced.nodes) or 1.0
    shown: list[NodeTime] = list(times[:_SHOWN])
    for time_ in shown:
        host = [f"{time_.host_ms:.3f}"] if has_device else []
        second = str(time_.nodes) if kind == "operator" else time_.operator
        share = f"{time_.ms / total:.0%}"
        table.add_row(
            _short(time_.name, 28), second, time_.provider, f"{time_.ms:.3f}", *host, share, f"{time_.first_ms:.3f}"
        )
    rest = times[_SHOWN:]
    if rest:
        rest_ms, first_ms = sum(time.ms for time in rest), sum(time.first_ms for time in rest)
        host = [f"{sum(time.host_ms for time in rest):.3f}"] if has_device else []
        label = f"{len(rest)} more"
        table.add_row(label, "", "", f"{rest_ms:.3f}", *host, f"{rest_ms / total:.0%}", f"{first_ms:.3f}")
    return table


def _draw(path: Path, name: str, report: Mapping[str, Any], traced: Profile) -> None:
    """Two panels: steady time by operator, and by node, coloured by where they run."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    providers = list(dict.fromkeys(node.provider for node in traced.nodes))
    colours = dict(zip(providers, plt.get_cmap("tab10").colors, strict=False))  # type: ignore[attr-defined]
    figure, panels = plt.subplots(1, 2, figsize=(13, 5.2), layout="constrained")
    for panel, title, times in ((panels[0], "operator", traced.operators), (panels[1], "node", traced.nodes)):
        shown = list(times[:_SHOWN])
        labels = [f"{t.name} x{t.nodes}" if title == "operator" else _short(t.name) for t in shown]
        values, tints = [t.ms for t in shown], [colours[t.provider] for t in shown]
        rest = times[_SHOWN:]
        if rest and title == "operator":
            labels.append(f"{len(rest)} more")
            values.append(sum(t.ms for t in rest))
            tints.append((0.7, 0.7, 0.7))
        bars = panel.barh(range(len(values)), values, color=tints)
        panel.bar_label(bars, [f"{value:.2f}" if value >= 0.01 else f"{value:.3f}" for value in values], padding=3)
        panel.set_yticks(range(len(labels)), labels)
        panel.invert_yaxis()
        panel.margins(x=0.12)
        panel.set_xlabel("ms a run, steady")
        panel.set_title(f"by {title}" if title == "operator" else f"the longest of {len(times)} nodes")
        panel.spines[["top", "right"]].set_visible(False)
    handles = [Patch(color=colours[provider]) for provider in providers]
    panels[0].legend(handles, providers, title="runs on", loc="lower right")
    shapes = ", ".join(f"{key} {shape}" for key, shape in report["inputs"].items())
    figure.suptitle(
        f"{name}: {shapes}\nfirst run {report['first_ms']:.2f} ms, then {report['steady_ms']:.2f} ms "
        f"({report['outside_nodes_ms']:.2f} ms outside the nodes)"
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _short(name: str, limit: int = 38) -> str:
    """The beginning and the end of a long node name tell it apart."""
    head = limit * 3 // 5
    return name if len(name) <= limit else f"{name[:head]}…{name[head + 1 - limit :]}"
