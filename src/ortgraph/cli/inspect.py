"""`ortgraph inspect`: what is in an ONNX model, where it runs, what forbids capture, what may be padded, its memory."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import onnx
import typer

from ..buckets import Ladder, default_batch_ladder
from ..config import ModelConfig
from ..engine import Engine
from ..errors import RequestError
from ..preflight import Findings
from ..providers import open_provider
from ..signature import Signature, Sizes, TensorSpec
from . import pbtxt
from .console import console
from .files import CommandError, external_files, load_model, reported
from .graphfacts import Obstacle, nodes, obstacles, quantised, weights
from .progress import Step, steps
from .proposal import Wishes, instance_kind, propose

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="An ONNX file or a model directory.", show_default=False)]
Buckets = Annotated[
    str, typer.Option(help="For an ONNX file: sizes to compute memory for, 'x[3]=320,640'.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]

_ALIGN_BYTES = 256
_SHOWN_BUCKETS = 8
_SHOWN_NODES = 3
_MAX_RUNS = 64
# What computes sizes; ONNX Runtime keeps such nodes on the CPU on purpose when they work on sizes.
_SIZE_WORK = frozenset(
    {"Shape", "Size", "Gather", "Slice", "Concat", "Squeeze", "Unsqueeze", "Cast", "Range", "ConstantOfShape"}
    | {"Add", "Sub", "Mul", "Div", "Equal", "Where", "Expand", "Reshape", "ReduceProd", "Min", "Max", "Identity"}
)
_STEPS = 6
_TRIAL_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class Dimension:
    """A dynamic size: the input axes that have it, whether padding it is proven, and why not."""

    name: str
    axes: list[str]
    is_batch: bool
    is_padded: bool
    reason: str


@dataclass(frozen=True)
class Bucket:
    """Bytes of one bucket's inputs and outputs; `outputs_bytes` is None where no run gave their shape."""

    name: str
    inputs_bytes: int
    outputs_bytes: int | None


def inspect(model: Model, buckets: Buckets = "", as_json: AsJson = False) -> None:
    """Say what is in a model and how it would be served. Example: ortgraph inspect my_model.onnx"""
    with reported(), steps(_STEPS) as step:
        report = _examine(model, buckets, step)
    if as_json:
        print(json.dumps(report))
    else:
        _show(report)


def _examine(path: Path, buckets: str, step: Step) -> dict[str, Any]:
    """Everything that is shown, as plain data."""
    step("reading the model")
    if path.is_dir():
        config, file = of_directory(path)
        model = load_model(file, with_data=False)
        step("measuring what may be padded")
        if not config.input:
            config = _proposed(model, file, path.name, config, step)
    else:
        file, model = path, load_model(path, with_data=False)
        config = propose(model, file, Wishes(file.stem, buckets=buckets), step).config
    settings = pbtxt.settings(_all_candidates(config), file, kind=instance_kind())
    step("measuring memory")
    engine = Engine.load(replace(settings, graph_capture="off"))
    try:
        memory = memory_of(engine)
        dimensions = _dimensions(*_measured(engine))
        tensors = [
            {"kind": kind, "name": spec.name, "type": spec.dtype.short, "shape": list(spec.shape)}
            for kind, specs in (("input", engine.signature.inputs), ("output", engine.signature.outputs))
            for spec in specs
        ]
    finally:
        engine.close()
    step("asking ONNX Runtime where nodes run")
    placement = _placement(settings)
    size_bytes = file.stat().st_size + sum((file.parent / name).stat().st_size for name in external_files(model))
    return {
        "file": str(file),
        "size_bytes": size_bytes,
        "ir_version": model.ir_version,
        "opsets": {opset.domain or "ai.onnx": opset.version for opset in model.opset_import},
        "producer": f"{model.producer_name} {model.producer_version}".strip(),
        "tensors": tensors,
        "dimensions": [asdict(dimension) for dimension in dimensions],
        "max_batch_size": config.max_batch_size,
        "operators": dict(Counter(node.op_type for node in nodes(model.graph)).most_common()),
        "placement": placement,
        "capture": [asdict(obstacle) for obstacle in (*obstacles(model), *_on_the_wrong_side(placement))],
        "weights": [asdict(weight) for weight in weights(model)],
        "quantised": quantised(model),
        "memory": [asdict(bucket) for bucket in memory],
    }


def of_directory(folder: Path) -> tuple[pbtxt.TritonConfig, Path]:
    """A model directory's config and the ONNX file of its latest version."""
    config = pbtxt.read(folder / "config.pbtxt")
    versions = sorted((int(path.name), path) for path in folder.iterdir() if path.is_dir() and path.name.isdigit())
    if not versions:
        raise CommandError(f"{folder} is not a model directory: it has no version folder such as 1/")
    return config, versions[-1][1] / (config.default_model_filename or "model.onnx")


def _proposed(
    model: onnx.ModelProto, file: Path, name: str, config: pbtxt.TritonConfig, step: Step
) -> pbtxt.TritonConfig:
    """A config without inputs is completed by the server; here by what would be proposed within its parameters."""
    values = {key: pbtxt.parameter(config, key) for key in ("buckets", "value_ranges")}
    provider = pbtxt.parameter(config, "execution_provider") or "auto"
    return propose(model, file, Wishes(name, config.max_batch_size or None, provider=provider, **values), step).config


def _all_candidates(config: pbtxt.TritonConfig) -> pbtxt.TritonConfig:
    """The config with every dynamic size as a candidate for padding, so that each is measured."""
    tried = pbtxt.TritonConfig()
    tried.CopyFrom(config)
    for entry in tried.input:
        entry.allow_ragged_batch = bool(config.max_batch_size) and -1 in entry.dims
    return tried


def _measured(engine: Engine) -> tuple[Signature, Findings]:
    """What was proven of every dimension; where requests are not joined, each is tried with sizes for it."""
    unsized = {dim.name for dim, ladder in zip(engine.signature.dims, engine.table.ladders, strict=True) if not ladder}
    if engine.config.max_batch_size or not unsized:
        return engine.signature, engine.findings
    sizes = {**engine.config.buckets, **dict.fromkeys(unsized, _TRIAL_SIZES)}
    tried = Engine.load(replace(engine.config, buckets=sizes))
    tried.close()
    return tried.signature, tried.findings


def _dimensions(signature: Signature, findings: Findings) -> list[Dimension]:
    found = []
    for place, (dim, is_padded) in enumerate(zip(signature.dims, findings.padded, strict=True)):
        is_batch = signature.is_batched and place == 0
        starts: tuple[str, ...] = (
            ("requests are never joined: ",) if is_batch else (f"dimension '{dim.name}' is never padded: ",)
        )
        starts += ("nothing is padded: ", "requests are never joined or padded, since ")
        reasons = [note.removeprefix(start) for start in starts for note in findings.notes if note.startswith(start)]
        if not is_padded and not reasons:
            reasons = list(findings.notes) or ["padding is off"]
        reason = "" if is_padded else reasons[0]
        found.append(Dimension(dim.name, [f"{name}[{axis}]" for name, axis in dim.axes], is_batch, is_padded, reason))
    return found


def _placement(settings: ModelConfig) -> dict[str, dict[str, Any]]:
    """By execution provider: how many nodes of each operator, and the nodes' names.

    As ONNX Runtime assigns them, after its basic optimizations and before fusions.
    """
    recorded = {**settings.session_config, "session.record_ep_graph_assignment_info": "1"}
    provider: Any = open_provider(replace(settings, session_config=recorded, graph_capture="off"))
    try:
        found: dict[str, dict[str, Any]] = {}
        for part in provider._session.get_provider_graph_assignment_info():
            of_provider = found.setdefault(part.ep_name, {"operators": Counter(), "nodes": []})
            for node in part.get_nodes():
                of_provider["operators"][node.op_type] += 1
                of_provider["nodes"].append(f"{node.op_type} {node.name}".strip())
    finally:
        provider.close()
    return {
        name: {"operators": dict(of["operators"].most_common()), "nodes": of["nodes"]} for name, of in found.items()
    }


def _on_the_wrong_side(placement: Mapping[str, Mapping[str, Any]]) -> list[Obstacle]:
    """Nodes that ONNX Runtime put on the CPU although the model runs on a GPU."""
    others = [name for name in placement if name != "CPUExecutionProvider"]
    if not others or "CPUExecutionProvider" not in placement:
        return []
    on_cpu = placement["CPUExecutionProvider"]["nodes"]
    sizes = tuple(node for node in on_cpu if node.split()[0] in _SIZE_WORK)
    rest = tuple(node for node in on_cpu if node not in sizes)
    found = []
    if sizes:
        mend = "none needed on CUDA; for WebGPU a bucket's fixed sizes fold them away"
        found.append(Obstacle(sizes, "ONNX Runtime computes sizes on the CPU", ("webgpu",), mend))
    if rest:
        mend = "export with another opset or element type, or replace the operator"
        reason = f"{others[0]} has no kernel for it, so it runs on the CPU"
        found.append(Obstacle(rest, reason, ("cuda", "webgpu"), mend))
    return found


def memory_of(engine: Engine) -> list[Bucket]:
    """Bytes of each bucket. The outputs' shapes come from one run of a row at each size."""
    signature = engine.signature
    ladders: list[Ladder | None] = list(engine.table.ladders)
    if signature.is_batched and ladders[0] is None:
        ladders[0] = default_batch_ladder(engine.config.max_batch_size)
    if not all(ladders):
        return []
    found = []
    runs: dict[Sizes, int | None] = {}
    for sizes in itertools.product(*(ladder or () for ladder in ladders)):
        rows = sizes[0] if signature.is_batched else 1
        row = (1, *sizes[1:]) if signature.is_batched else sizes
        if row not in runs:
            runs[row] = _outputs_bytes(engine, row) if len(runs) < _MAX_RUNS else None
        inputs = sum(
            _aligned(_bytes(spec, signature.shape(spec, sizes))) for spec in signature.inputs if spec.is_required
        )
        outputs = runs[row]
        found.append(Bucket(_bucket_name(signature, sizes), inputs, None if outputs is None else outputs * rows))
    return found


def _bucket_name(signature: Signature, sizes: Sizes) -> str:
    """`batch=8,sequence=64`, as in the metrics; a model without dynamic sizes has one bucket."""
    return ",".join(f"{dim.name}={size}" for dim, size in zip(signature.dims, sizes, strict=True)) or "the only one"


def _outputs_bytes(engine: Engine, sizes: Sizes) -> int | None:
    """The bytes of all outputs of one run on the smallest allowed values."""
    inputs = {}
    for spec in engine.signature.inputs:
        if spec.is_required:
            low, high = engine.config.value_ranges.get(spec.name, (0, 0))
            fill = b"" if spec.dtype.is_string else min(max(0, low), high)
            inputs[spec.name] = np.full(engine.signature.shape(spec, sizes), fill, spec.dtype.storage)
    try:
        answer = engine.run(inputs)
    except RequestError:
        return None
    by_name = {spec.name: spec for spec in engine.signature.outputs}
    return sum(_aligned(_bytes(by_name[name], array.shape)) for name, array in answer.items())


def _bytes(spec: TensorSpec, shape: Sequence[int]) -> int:
    """Strings have no fixed size and count as nothing."""
    return 0 if spec.dtype.is_string else math.prod(shape) * spec.dtype.storage.itemsize


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _show(report: Mapping[str, Any]) -> None:
    opsets = ", ".join(f"{domain} {version}" for domain, version in report["opsets"].items())
    by = f", made by {report['producer']}" if report["producer"] else ""
    console.print(
        f"{report['file']}: {_mb(report['size_bytes'])}, IR {report['ir_version']}, opset {opsets}{by}", markup=False
    )
    rows = [("", "tensor", "type", "shape")]
    for tensor in report["tensors"]:
        shape = ", ".join("?" if size is None else str(size) for size in tensor["shape"])
        rows.append((tensor["kind"], tensor["name"], tensor["type"], f"[{shape}]"))
    _columns(rows)
    _section("dimensions", _dimension_lines(report["dimensions"], report["max_batch_size"]) or ["none"])
    operators = [f"{name} {count}" for name, count in report["operators"].items()]
    _section("operators", [", ".join(operators)])
    on = report["placement"]
    only = "" if len(on) > 1 or "CPUExecutionProvider" not in on else ", all of them: no GPU is here or asked for"
    _section("runs on", [f"{name}: {len(of['nodes'])} nodes{only}" for name, of in on.items()])
    _section(
        "capture", [_obstacle_line(obstacle) for obstacle in report["capture"]] or ["nothing in the graph forbids it"]
    )
    _section(
        "weights",
        [f"{w['dtype']}: {w['count']} tensors, {_mb(w['size_bytes'])}" for w in report["weights"]] or ["none"],
    )
    _section("quantised", report["quantised"] or ["nothing"])
    _show_memory(report["memory"], sum(weight["size_bytes"] for weight in report["weights"]))


def _section(title: str, lines: Sequence[str]) -> None:
    for place, line in enumerate(lines):
        console.print(f"{title if not place else '':<10}  {line}", markup=False)


def _columns(rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> None:
    """Rows of text in columns, the one of `numbers` flush right; unlike rich's table nothing is ever cut or folded."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            f"{cell:>{w}}" if i in numbers else f"{cell:<{w}}"
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        console.print("  ".join(cells).rstrip(), markup=False)


def _dimension_lines(dims: Sequence[Mapping[str, Any]], max_batch_size: int) -> list[str]:
    lines, before = [], ""
    for dim in dims:
        verb = "join" if dim["is_batch"] else "pad"
        reason = "for the same reason" if dim["reason"] == before else dim["reason"]
        said = f"safe to {verb} (measured)" if dim["is_padded"] else f"not safe to {verb}: {reason}"
        if dim["is_batch"] and dim["is_padded"]:
            said += f", up to {max_batch_size} rows"
        axes = ", ".join(dim["axes"])
        lines.append(f"{dim['name']}{f' ({axes})' if axes != dim['name'] else ''}: {said}")
        before = dim["reason"] or before
    return lines


def _obstacle_line(obstacle: Mapping[str, Any]) -> str:
    names = obstacle["nodes"]
    more = f" and {len(names) - _SHOWN_NODES} more" if len(names) > _SHOWN_NODES else ""
    return (
        f"not on {' and '.join(obstacle['providers'])}: {', '.join(names[:_SHOWN_NODES])}{more}: "
        f"{obstacle['reason']}; {obstacle['mend']}"
    )


def _show_memory(buckets: Sequence[Mapping[str, Any]], weights_bytes: int) -> None:
    if not buckets:
        _section("memory", ["no buckets: a dimension has no sizes; give --buckets to see what they would take"])
        return
    stride = max(1, math.ceil((len(buckets) - 1) / (_SHOWN_BUCKETS - 1)))
    chosen = [bucket for place, bucket in enumerate(buckets[:-1]) if place % stride == 0] + [buckets[-1]]
    rows = [("bucket", "inputs", "outputs", "host staging")]
    for bucket in chosen:
        outputs = bucket["outputs_bytes"]
        total = None if outputs is None else bucket["inputs_bytes"] + outputs
        rows.append((bucket["name"], _mb(bucket["inputs_bytes"]), _mb(outputs), _mb(total)))
    _columns(rows, numbers=(1, 2, 3))
    known = [bucket["inputs_bytes"] + (bucket["outputs_bytes"] or 0) for bucket in buckets]
    few = f" ({len(chosen)} of {len(buckets)} shown)" if len(chosen) < len(buckets) else ""
    _section(
        "memory",
        [
            f"{len(buckets)} buckets{few}; weights {_mb(weights_bytes)}; intermediate results come on top",
            f"device: {_mb(max(known))} for inputs and outputs on CUDA, whose buckets share them; "
            f"{_mb(sum(known))} on WebGPU, where each has its own",
            f"host: {_mb(max(known))} of staging for each batch in flight",
        ],
    )


def _mb(size_bytes: int | None) -> str:
    if size_bytes is None:
        return "unknown"
    return f"{size_bytes / 1e6:.1f} MB" if size_bytes >= 1e5 else f"{size_bytes / 1e3:.1f} kB"
