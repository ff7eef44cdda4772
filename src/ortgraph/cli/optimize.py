"""`ortgraph optimize`: inputs frozen, branches folded, operators fused, half precision; checked and saved."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import onnx
import typer
from rich.table import Table

from ..errors import OrtgraphError, first_line
from ..providers.base import Array
from . import accuracy, files, freezing
from .accuracy import Candidate
from .console import console, steps
from .files import CommandError

_TOLERANCE, _FP16_TOLERANCE = 1e-3, 2e-2
_CONTRIB = "com.microsoft"
_DATA = "basic.onnx.data"


@dataclass(frozen=True)
class _Side:
    """A model before or after, on the CPU."""

    nodes: int
    size_bytes: int
    load_s: float
    latency_s: float


def optimize(
    model: Annotated[Path, typer.Argument(help="MODEL.onnx")],
    output: Annotated[Path, typer.Option("--output", "-o", help="OUT.onnx")],
    freeze: Annotated[
        list[str] | None, typer.Option(help="INPUT=VALUE, INPUT[AXIS]=SIZE or DIMENSION=SIZE; may be repeated.")
    ] = None,
    fp16: Annotated[bool, typer.Option("--fp16", help="Convert to half precision, for a GPU.")] = False,
    keep_io_types: Annotated[
        bool, typer.Option("--keep-io-types", help="With --fp16, inputs and outputs stay single precision.")
    ] = False,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0.0, help="Largest error, relative to the output's largest value [0.001; with --fp16 0.02]"),
    ] = None,
    inputs: accuracy.Inputs = None,
    sizes: accuracy.Sizes = "",
    value_ranges: accuracy.ValueRanges = "",
    force: accuracy.Force = False,
    as_json: accuracy.AsJson = False,
) -> None:
    """Freeze inputs, fuse operators, convert to half precision, check the answers and save a model that loads fast.

    The result is not tied to a provider: it runs on ONNX Runtime's CPU and CUDA providers alike.

    Example: ortgraph optimize model.onnx -o fast.onnx --fp16
    """
    with files.reported(), files.new_file(output, force=force) as target, steps(6) as begin:
        begin("reading")
        proto = files.load_model(model)
        before = Candidate(model)
        operators = _operators(proto)
        frozen = freezing.parse_freeze(freeze or [], before.inputs)
        begin("choosing inputs")
        if inputs:
            samples = accuracy.read_samples(before, inputs, frozen.values)
        else:
            samples = accuracy.draw_samples(before, sizes, value_ranges, frozen.values, frozen.sizes)
        begin("folding constants and branches")
        freezing.freeze(proto, frozen)
        basic = _basic(proto, output.parent)
        notes = [note for note in (freezing.control_flow(basic),) if note]
        allowed = tolerance if tolerance is not None else _FP16_TOLERANCE if fp16 else _TOLERANCE

        def attempt(candidate: onnx.ModelProto) -> tuple[Candidate, list[accuracy.Agreement], Counter[str]]:
            made = _half(candidate, keep_io_types) if fp16 else candidate
            counts = _operators(made)
            _drop_unused_opsets(made)
            files.save_model(made, target)
            after = Candidate(target)
            agreements = accuracy.compare(before, after, samples, frozen.values)
            accuracy.check(agreements, allowed)
            return after, agreements, counts

        begin("fusing operators and comparing answers")
        try:
            after, agreements, counts = attempt(_fused(basic))
        except OrtgraphError as error:
            if not _has_products(basic):
                raise
            begin("comparing answers without fused operators")
            after, agreements, counts = attempt(basic)
            notes.append(f"operators are not fused: {str(error).removesuffix(accuracy.UNWRITTEN)}")
        begin("measuring")
        sample = samples.runs[0]
        sides = (
            _measured(model, operators.total(), before, {**sample, **frozen.values}),
            _measured(target, counts.total(), after, sample),
        )
    fused = {name: n for name, n in (counts - operators).items() if name.startswith(_CONTRIB) or "LayerNorm" in name}
    notes += [samples.remark] if samples.remark else []
    if as_json:
        report: dict[str, Any] = {"output": str(output), "provider": "CPUExecutionProvider", "fused": fused}
        report |= {"before": asdict(sides[0]), "after": asdict(sides[1]), "tolerance": allowed, "notes": notes}
        print(json.dumps(report | {"runs": len(samples.runs), "outputs": [asdict(found) for found in agreements]}))
        return
    _print(sides)
    shown = (f"{n} {name.rpartition('.')[2]}" for name, n in sorted(fused.items()))
    console.print(f"fused operators: {', '.join(shown) or 'none'}")
    accuracy.print_agreements(agreements, len(samples.runs), notes)
    console.print(f"wrote {output}", markup=False)


def _operators(model: onnx.ModelProto) -> Counter[str]:
    """How many nodes of each operator there are, in branches and loops too."""
    found: Counter[str] = Counter()
    graphs = [model.graph]
    while graphs:
        for node in graphs.pop().node:
            found[f"{node.domain}.{node.op_type}" if node.domain else node.op_type] += 1
            graphs += freezing.subgraphs(node)
    return found


def _basic(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """What ONNX Runtime's basic optimisations leave of a model; they run in a process of their own.

    Raises:
        CommandError: ONNX Runtime refuses the model, or crashes.
    """
    data = [_DATA] if files.weight_bytes(model) > files.ONE_FILE_BYTES else []
    with tempfile.TemporaryDirectory(dir=folder, prefix=".optimize-") as work:
        source, target = Path(work) / "frozen.onnx", Path(work) / "basic.onnx"
        files.save_model(model, source)
        command = [sys.executable, "-m", "ortgraph.graph_optimiser", str(source), str(target), *data]
        done = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)
        if done.returncode < 0:
            raise CommandError(f"ONNX Runtime crashed (signal {-done.returncode}) while it optimised the model")
        if done.returncode:
            raise CommandError(f"ONNX Runtime cannot optimise the model: {done.stderr.strip()}")
        return files.load_model(target)


def _drop_unused_opsets(model: onnx.ModelProto) -> None:
    """In place: ONNX Runtime names every operator set that it knows, where others need a reason to refuse one."""
    used = {name.rpartition(".")[0] for name in _operators(model)} | {""}
    opsets = [opset for opset in model.opset_import if opset.domain in used]
    del model.opset_import[:]
    model.opset_import.extend(opsets)


def _has_products(model: onnx.ModelProto) -> bool:
    """Whether there may be something to fuse: without products the optimizer finds nothing, in up to a minute."""
    return any(node.op_type == "MatMul" for node in model.graph.node)


def _fused(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with the fused operators of ONNX Runtime's transformer optimizer, where there are matrix products.

    The attention mask stays a mask: the optimizer's default makes a length of it, which allows no holes. The embedding
    look-up is not fused: on CUDA the fused one reads foreign memory for an id outside the table.

    Raises:
        CommandError: it fails on this model.
    """
    with files.quiet_tools():
        from onnxruntime.transformers.fusion_options import FusionOptions  # 0.4 s that other commands do not need
        from onnxruntime.transformers.optimizer import optimize_by_fusion

        options = FusionOptions("bert")
        options.use_raw_attention_mask()
        options.enable_embed_layer_norm = False
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        if not _has_products(model):
            return copy
        try:
            fused: onnx.ModelProto = optimize_by_fusion(copy, "bert", 0, 0, options).model
        except Exception as error:
            raise CommandError(f"the transformer optimizer fails: {first_line(error)}") from error
    return fused


def _half(model: onnx.ModelProto, keep_io_types: bool) -> onnx.ModelProto:
    """A copy in half precision, but for the operators that ONNX Runtime's converter keeps in single.

    Its symbolic shape inference is slow, and only for what ONNX's own cannot take: contrib operators, large models.

    Raises:
        CommandError: it fails on this model.
    """
    with files.quiet_tools():
        from onnxruntime.transformers.float16 import convert_float_to_float16
        from onnxruntime.transformers.onnx_model import OnnxModel

        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        is_large = files.weight_bytes(model) > files.ONE_FILE_BYTES
        try:
            if is_large or any(node.domain for node in model.graph.node):
                half = OnnxModel(copy)
                half.convert_float_to_float16(keep_io_types=keep_io_types)
            else:
                half = OnnxModel(convert_float_to_float16(copy, keep_io_types=keep_io_types))
            half.topological_sort()
        except Exception as error:
            raise CommandError(f"the conversion to fp16 fails: {first_line(error)}") from error
        made: onnx.ModelProto = half.model
    return made


def _measured(path: Path, nodes: int, candidate: Candidate, inputs: dict[str, Array]) -> _Side:
    load_s = min(candidate.load_s, Candidate(path).load_s)
    return _Side(nodes, files.file_bytes(path), load_s, candidate.latency_s(inputs))


def _print(sides: tuple[_Side, _Side]) -> None:
    table = Table("", "nodes", "MB", "load ms (CPU)", "run ms (CPU)")
    for name, side in zip(("before", "after"), sides, strict=True):
        seconds = (f"{1e3 * value:.1f}" for value in (side.load_s, side.latency_s))
        table.add_row(name, str(side.nodes), f"{side.size_bytes / 1e6:.1f}", *seconds)
    console.print(table)
