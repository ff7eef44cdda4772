"""Weight formats by M: `python -m benchmarks.weight_formats [--output FILE]`, on a GPU in under two minutes.

One model of equal square products, once with fp16 weights and once with 4-bit ones (MatMulNBits); on CUDA the latter
also with `ep.cuda.fpa_intb_gemm`. Each is timed at each M as a captured graph, in turns, with the copies up and down,
and the answers are compared.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import onnx
import typer
from onnx import TensorProto, helper, numpy_helper
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.report import RESULTS
from ortgraph.config import ModelConfig
from ortgraph.errors import OrtgraphError
from ortgraph.signature import Sizes
from ortgraph.tuning.weights import FPA_INTB, Format, FormatTable, fpa_settings, measure_formats

M_VALUES = (1, 2, 4, 8, 16, 32, 64)
BLOCK = 32  # weights that share a scale; fpA_intB's kernels take 32, 64 and 128
console = Console(highlight=False)


def products(layers: int, width: int, *, is_half: bool, seed: int = 0) -> onnx.ModelProto:
    """x [batch, width] times `layers` weights [width, width]. Values keep their size from layer to layer.

    The weights are rolled copies of one random matrix: drawing each anew would take longer than measuring.
    """
    element = np.float16 if is_half else np.float32
    kind = TensorProto.FLOAT16 if is_half else TensorProto.FLOAT
    matrix = np.random.default_rng(seed).standard_normal((width, width), np.float32) / np.float32(np.sqrt(width))
    names = [f"h{i}" for i in range(layers)]
    weights = [numpy_helper.from_array(np.roll(matrix, 7 * i).astype(element), f"w{i}") for i in range(layers)]
    nodes = [
        helper.make_node("MatMul", [source, f"w{i}"], [target], name=f"product{i}")
        for i, (source, target) in enumerate(zip(["x", *names], [*names[:-1], "y"], strict=False))
    ]
    graph = helper.make_graph(
        nodes,
        "products",
        [helper.make_tensor_value_info("x", kind, ["batch", width])],
        [helper.make_tensor_value_info("y", kind, ["batch", width])],
        weights,
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def quantised(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model with symmetric 4-bit weights in blocks."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    logging.getLogger("onnxruntime.quantization.matmul_nbits_quantizer").setLevel(logging.WARNING)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    quantizer = MatMulNBitsQuantizer(copy, block_size=BLOCK, is_symmetric=True)
    quantizer.process()
    made: onnx.ModelProto = quantizer.model.model
    return made


def measure(folder: Path, layers: int, width: int, ms: list[int], budget_s: float, *, is_gpu: bool) -> FormatTable:
    """Build the models in `folder` and measure them at each M.

    The CPU has no fp16 products, so there the plain weights are fp32.
    """
    end_s = time.monotonic() + budget_s
    plain = "fp16" if is_gpu else "fp32"
    console.print(f"building {layers} products of {width} x {width}: {plain}, int4")
    model = products(layers, width, is_half=is_gpu)
    onnx.save(model, folder / "plain.onnx")
    onnx.save(quantised(model), folder / "int4.onnx")
    del model
    sizes: list[Sizes] = [(m,) for m in ms]

    def config(file: str, **session_config: str) -> ModelConfig:
        return ModelConfig(
            "products",
            "1",
            folder / file,
            padding="off",  # nothing to prove: every M is run as it is
            instance_kind="GPU" if is_gpu else "CPU",
            buckets={"batch": tuple(sorted(ms))},
            session_config=session_config,
        )

    formats = [Format(plain, config("plain.onnx")), Format("int4", config("int4.onnx"))]
    if is_gpu:
        formats.append(Format(f"int4{FPA_INTB}", config("int4.onnx", **fpa_settings(sizes)), like="int4"))
    rng = np.random.default_rng(1)

    def draw(each: Sizes) -> dict[str, Any]:
        return {"x": rng.standard_normal((each[0], width), np.float32).astype(np.float16 if is_gpu else np.float32)}

    return measure_formats(
        formats, sizes, draw, is_over=lambda: time.monotonic() > end_s, tell=lambda text: console.print(text)
    )


def main(
    layers: Annotated[int, typer.Option(min=1)] = 16,
    width: Annotated[int, typer.Option(min=32, help="A multiple of 32.")] = 4096,
    m: Annotated[list[int] | None, typer.Option(min=1, help="May be given again; default: 1 to 64.")] = None,
    budget_s: Annotated[float, typer.Option(min=1, help="No further round is begun after so many seconds.")] = 80.0,
    output: Annotated[Path, typer.Option(help="Where the JSON goes.")] = RESULTS / "weight_formats.json",
) -> None:
    """Measure the weight formats by M. Example: python -m benchmarks.weight_formats --output weight_formats.json"""
    ms = sorted(set(m or M_VALUES))
    try:
        with TemporaryDirectory(prefix="ortgraph-weights-") as folder:
            table = measure(Path(folder), layers, width, ms, budget_s, is_gpu=bool(machine.gpus()))
    except OrtgraphError as error:
        console.print(f"error: {error}", style="bold red", markup=False)
        raise typer.Exit(1) from None
    labels = list(table.seconds)
    shown = Table(box=SIMPLE_HEAD, padding=(0, 1))
    for heading in ("M", *(f"{label} us" for label in labels), "winner"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in table.rows():
        shown.add_row(str(row["m"]), *(f"{row['us'][label]:.1f}" for label in labels), row["winner"])
    console.print(shown)
    for label, reason in table.refused.items():
        console.print(f"{label}: left out, {reason}", markup=False)
    described = machine.describe(machine.command_line())
    described["command"] = str(described["command"]).replace("-m benchmarks", "-m benchmarks.weight_formats")
    result = {
        **described,
        "layers": layers,
        "width": width,
        "block": BLOCK,
        "rows": table.rows(),
        "noise": {label: round(noise, 4) for label, noise in table.noise.items()},
        "largest_difference": table.errors,
        "refused": table.refused,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=2) + "\n")
    console.print(f"wrote {output}")


if __name__ == "__main__":
    typer.run(main)
