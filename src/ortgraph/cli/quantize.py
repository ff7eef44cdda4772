"""`ortgraph quantize`: the weights of matrix products in 4 or 8 bits, with a report on what that costs in accuracy."""

from __future__ import annotations

import fnmatch
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from ..errors import first_line, nearest
from ..tactics import GEMM
from . import accuracy, files, freezing
from .accuracy import Candidate
from .console import console
from .files import CommandError
from .progress import steps

_BLOCKS = (16, 32, 64, 128, 256)
_FAST_BLOCKS = (32, 64, 128)  # of ep.cuda.fpa_intb_gemm
_OTHER_PRODUCTS = ("Attention", "Gemm")


@dataclass(frozen=True)
class _Product:
    """A MatMul with a constant weight [K, N]."""

    node: NodeProto
    weight: TensorProto

    def matches(self, pattern: str) -> bool:
        """Whether a name or glob means it, by the name of its node or of its weight."""
        return any(fnmatch.fnmatchcase(name, pattern) for name in (self.node.name, self.weight.name))


def quantize(
    model: Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="An ONNX file.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="OUT.onnx", help="Where the result goes.")],
    bits: Annotated[int, typer.Option(help="4 or 8.")] = 4,
    block_size: Annotated[int, typer.Option(help="Weights that share a scale: 16, 32, 64, 128 or 256.")] = 32,
    symmetric: Annotated[bool, typer.Option("--symmetric", help="Without zero points.")] = False,
    exclude: Annotated[
        list[str] | None, typer.Option(help="A MatMul to keep, by name or glob of its node or weight; repeatable.")
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(min=0.0, help="Refuse an error above it, relative to the output's largest value.")
    ] = None,
    inputs: accuracy.Inputs = None,
    sizes: accuracy.Sizes = "",
    value_ranges: accuracy.ValueRanges = "",
    force: accuracy.Force = False,
    as_json: accuracy.AsJson = False,
) -> None:
    """Quantise weights to 4 or 8 bits (MatMulNBits) and compare the answers with the original's.

    Example: ortgraph quantize model.onnx -o small.onnx --inputs real.npz
    """
    if bits not in (4, 8):
        raise typer.BadParameter("must be 4 or 8", param_hint="--bits")
    if block_size not in _BLOCKS:
        raise typer.BadParameter(f"must be one of {', '.join(map(str, _BLOCKS))}", param_hint="--block-size")
    with files.reported(), files.new_file(output, force=force) as target, steps(5) as begin:
        begin("reading")
        proto = files.load_model(model)
        before = Candidate(model)
        begin("choosing inputs")
        if inputs:
            samples = accuracy.read_samples(before, inputs, {})
        else:
            samples = accuracy.draw_samples(before, sizes, value_ranges, {}, {})
        wanted, side = accuracy.answers(before, samples, {}), accuracy.measure(model, before, samples.runs[0])
        del before  # its weights, in memory
        begin("quantising weights")
        products = list(_products(_prepared(proto)))
        kept = _kept(products, exclude or [])
        if len(kept) == len(products):
            raise CommandError(f"{model.name} has no MatMul with a constant weight to quantise{accuracy.UNWRITTEN}")
        quantised = _quantised(proto, bits, block_size, symmetric, [product.node.name for product in kept])
        others = Counter(node.op_type for node in _nodes(quantised.graph) if node.op_type in _OTHER_PRODUCTS)
        fast = sum(_is_fast(node, quantised) for node in _nodes(quantised.graph))
        files.save_model(quantised, target)
        begin("comparing answers")
        after = Candidate(target)
        agreements = accuracy.compare(wanted, after, samples)
        accuracy.check(agreements, tolerance)
        begin("measuring")
        sides = {"before": side, "after": accuracy.measure(target, after, samples.runs[0])}
    count = len(products) - len(kept)
    notes = [samples.remark] if samples.remark else []
    if others:
        shown = ", ".join(f"{n} {name}" for name, n in others.items())
        notes.append(
            f"{shown} not quantised: ONNX Runtime's quantiser takes MatMul alone; quantise first, then optimise"
        )
    if as_json:
        report: dict[str, Any] = {"output": str(output), "provider": "CPUExecutionProvider", "bits": bits}
        report |= {"block_size": block_size, "symmetric": symmetric, "quantised": count, "fit_fpa_intb_gemm": fast}
        report |= {"kept": [product.node.name for product in kept], "tolerance": tolerance, "notes": notes}
        report |= {name: asdict(found) for name, found in sides.items()}
        print(json.dumps(report | {"runs": len(samples.runs), "outputs": [asdict(found) for found in agreements]}))
        return
    accuracy.print_measures(sides)
    console.print(
        f"{count} of {len(products)} MatMul in {bits} bits, blocks of {block_size}; {fast} of them can use {GEMM}"
    )
    accuracy.print_agreements(agreements, len(samples.runs), notes)
    console.print(f"wrote {output}", markup=False)


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """A graph and those inside it."""
    yield graph
    for node in graph.node:
        for inner in freezing.subgraphs(node):
            yield from _graphs(inner)


def _nodes(graph: GraphProto) -> Iterator[NodeProto]:
    return (node for inner in _graphs(graph) for node in inner.node)


def _prepared(model: ModelProto) -> ModelProto:
    """In place: weights that are Constant nodes become initializers, and every MatMul has a name of its own."""
    taken: set[str] = set()
    for graph in _graphs(model.graph):
        for node in list(graph.node):
            if node.op_type == "Constant" and node.attribute[0].name == "value":
                graph.initializer.add().CopyFrom(node.attribute[0].t)
                graph.initializer[-1].name = node.output[0]
                graph.node.remove(node)
            elif node.op_type == "MatMul":
                node.name = node.output[0] if not node.name or node.name in taken else node.name
                taken.add(node.name)
    return model


def _products(model: ModelProto) -> Iterator[_Product]:
    """What the quantiser takes: MatMul with a constant float matrix on the right, leading dims of 1 allowed."""
    weights = {tensor.name: tensor for graph in _graphs(model.graph) for tensor in graph.initializer}
    for node in _nodes(model.graph):
        weight = weights.get(node.input[1]) if node.op_type == "MatMul" else None
        if weight is None or weight.data_type not in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16):
            continue
        if len(weight.dims) >= 2 and all(size == 1 for size in weight.dims[:-2]):
            yield _Product(node, weight)


def _kept(products: Sequence[_Product], patterns: Sequence[str]) -> list[_Product]:
    """Those that a pattern excludes.

    Raises:
        CommandError: a pattern means none of them.
    """
    for pattern in patterns:
        if not any(product.matches(pattern) for product in products):
            names = [name for product in products for name in (product.node.name, product.weight.name)]
            raise CommandError(f"--exclude: no MatMul or weight is called '{pattern}'{nearest(pattern, names[:20])}")
    return [product for product in products if any(product.matches(pattern) for pattern in patterns)]


def _quantised(
    model: ModelProto, bits: int, block_size: int, is_symmetric: bool, excluded: Sequence[str]
) -> ModelProto:
    """The model with MatMulNBits; `model` is used up.

    Raises:
        CommandError: ONNX Runtime's quantiser fails.
    """
    with files.quiet_tools():
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

        try:
            quantizer = MatMulNBitsQuantizer(
                model, bits=bits, block_size=block_size, is_symmetric=is_symmetric, nodes_to_exclude=list(excluded)
            )
            quantizer.process()
        except Exception as error:
            raise CommandError(f"ONNX Runtime cannot quantise the model: {first_line(error)}") from error
        made: ModelProto = quantizer.model.model
    return made


def _is_fast(node: NodeProto, model: ModelProto) -> bool:
    """Whether the CUDA provider's fpA_intB kernels take it: fp16 or bf16, and sizes that fit their tiles."""
    if node.op_type != "MatMulNBits":
        return False
    value = {attribute.name: attribute.i for attribute in node.attribute}
    kind = next((tensor.data_type for tensor in model.graph.initializer if tensor.name == node.input[2]), None)
    return (
        kind in (TensorProto.FLOAT16, TensorProto.BFLOAT16)
        and value["block_size"] in _FAST_BLOCKS
        and value["N"] % (32 if value["bits"] == 8 else 64) == 0
        and value["K"] % value["block_size"] == 0
    )
