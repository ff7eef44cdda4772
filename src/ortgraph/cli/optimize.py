"""`ortgraph optimize`: inputs frozen, branches folded, operators fused, half precision; checked and saved."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import onnx
import typer

from ..errors import OrtgraphError, first_line
from . import accuracy, files, freezing
from .accuracy import Candidate
from .console import console
from .files import CommandError
from .progress import steps

_TOLERANCE, _FP16_TOLERANCE = 1e-3, 2e-2
_CONTRIB = "com.microsoft"
_BASIC = "basic.onnx"


def optimize(
    model: Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="An ONNX file.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="OUT.onnx", help="Where the result goes.")],
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
    if keep_io_types and not fp16:
        raise typer.BadParameter("goes with --fp16", param_hint="--keep-io-types")
    with (
        files.reported(),
        files.new_file(output, force=force) as target,
        files.work_folder(target) as work,
        steps(6) as begin,
    ):
        begin("reading")
        proto = files.load_model(model)
        operators = _operators(proto)
        before = Candidate(model)
        frozen = freezing.parse_freeze(freeze or [], before.inputs)
        begin("running the original")
        if inputs:
            samples = accuracy.read_samples(before, inputs, frozen.values)
        else:
            samples = accuracy.draw_samples(before, sizes, value_ranges, frozen.values, frozen.sizes)
        wanted = accuracy.answers(before, samples, frozen.values)
        sides = {"before": accuracy.measure(model, before, {**samples.runs[0], **frozen.values})}
        del before  # its weights, in memory
        begin("folding constants and branches")
        freezing.freeze(proto, frozen)
        basic = _basic(proto, work)
        notes = [note for note in (samples.remark, freezing.control_flow(basic)) if note]
        can_fuse = any(node.op_type == "MatMul" for node in basic.graph.node)
        del proto, basic
        allowed = tolerance if tolerance is not None else _FP16_TOLERANCE if fp16 else _TOLERANCE

        def attempt(source: Path) -> tuple[Candidate, list[accuracy.Agreement], Counter[str]]:
            made = _half(source, keep_io_types) if fp16 else files.load_model(source)
            counts = _operators(made)
            _drop_unused_opsets(made)
            files.save_model(made, target)
            candidate = Candidate(target)
            agreements = accuracy.compare(wanted, candidate, samples)
            accuracy.check(agreements, allowed)
            return candidate, agreements, counts

        begin("fusing operators and comparing answers")
        try:
            # Without products nothing is fused, and looking for it can take a minute.
            after, agreements, counts = attempt(_fused(work) if can_fuse else work / _BASIC)
        except OrtgraphError as error:
            if not can_fuse:
                raise
            begin("comparing answers without fused operators")
            after, agreements, counts = attempt(work / _BASIC)
            notes.append(f"operators are not fused: {str(error).removesuffix(accuracy.UNWRITTEN)}")
        begin("measuring")
        sides["after"] = accuracy.measure(target, after, samples.runs[0])
    fused = {name: n for name, n in (counts - operators).items() if name.startswith(_CONTRIB) or "LayerNorm" in name}
    nodes = {"before": operators.total(), "after": counts.total()}
    if as_json:
        report: dict[str, Any] = {"output": str(output), "provider": "CPUExecutionProvider", "fused": fused}
        report |= {name: {"nodes": nodes[name], **asdict(side)} for name, side in sides.items()}
        report |= {"tolerance": allowed, "notes": notes, "runs": len(samples.runs)}
        print(json.dumps(report | {"outputs": [asdict(found) for found in agreements]}))
        return
    accuracy.print_measures(sides)
    shown = ", ".join(f"{n} {name.rpartition('.')[2]}" for name, n in sorted(fused.items()))
    console.print(f"{nodes['before']} nodes before, {nodes['after']} after; fused operators: {shown or 'none'}")
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


def _basic(model: onnx.ModelProto, work: Path) -> onnx.ModelProto:
    """What ONNX Runtime's basic optimisations leave of a model, also written to `work`; in a process of their own.

    Raises:
        CommandError: ONNX Runtime refuses the model, or crashes.
    """
    data = [f"{_BASIC}.data"] if files.weight_bytes(model) > files.ONE_FILE_BYTES else []
    source, target = work / "frozen.onnx", work / _BASIC
    files.save_model(model, source)
    command = [sys.executable, "-m", "ortgraph.graph_optimiser", str(source), str(target), *data]
    done = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)
    if done.returncode < 0:
        raise CommandError(f"ONNX Runtime crashed (signal {-done.returncode}) while it optimised the model")
    if done.returncode:
        raise CommandError(f"ONNX Runtime cannot optimise the model: {done.stderr.strip()}")
    return files.load_model(target, with_data=False)


def _drop_unused_opsets(model: onnx.ModelProto) -> None:
    """In place: ONNX Runtime names every operator set that it knows, where others need a reason to refuse one."""
    used = {name.rpartition(".")[0] for name in _operators(model)} | {""}
    opsets = [opset for opset in model.opset_import if opset.domain in used]
    del model.opset_import[:]
    model.opset_import.extend(opsets)


def _fused(work: Path) -> Path:
    """A file with the fused operators of ONNX Runtime's transformer optimizer.

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
        try:
            fused = optimize_by_fusion(files.load_model(work / _BASIC), "bert", 0, 0, options).model
        except Exception as error:
            raise CommandError(f"the transformer optimizer fails: {first_line(error)}") from error
    files.save_model(fused, work / "fused.onnx")
    return work / "fused.onnx"


def _half(source: Path, keep_io_types: bool) -> onnx.ModelProto:
    """The model of a file in half precision, but for the operators that ONNX Runtime's converter keeps in single.

    Its symbolic shape inference is slow, and only for what ONNX's own does not know: contrib operators.

    Raises:
        CommandError: it fails on this model.
    """
    with files.quiet_tools():
        from onnxruntime.transformers.float16 import convert_float_to_float16
        from onnxruntime.transformers.onnx_model import OnnxModel

        has_contrib = any(node.domain for node in files.load_model(source, with_data=False).graph.node)
        try:
            if has_contrib:
                half = OnnxModel(files.load_model(source))
                half.convert_float_to_float16(keep_io_types=keep_io_types)
            else:
                half = OnnxModel(convert_float_to_float16(str(source), keep_io_types=keep_io_types))
            half.topological_sort()
        except Exception as error:
            raise CommandError(f"the conversion to fp16 fails: {first_line(error)}") from error
        made: onnx.ModelProto = half.model
    return made
