"""A model without a server: `python -m benchmarks.in_process MODEL_DIRECTORY --provider cuda`.

For each bucket, and for a stream of requests of random sizes, side by side in one process: `session.run`, IO binding
without graphs (CUDA), and the engine's captured graphs, all from host arrays to host arrays. Every answer is compared
with the CPU's. Variants take turns, so that a change of the machine's speed meets all alike.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from benchmarks import machine
from ortgraph import Engine, parse
from ortgraph.batch import Request
from ortgraph.cli.target import read_target
from ortgraph.config import ModelConfig
from ortgraph.errors import RequestError
from ortgraph.preflight import worst_error
from ortgraph.signature import Sizes

Array = np.ndarray[Any, Any]
Inputs = dict[str, Array]
RunModel = Callable[[Inputs], dict[str, Array]]


@dataclass(frozen=True)
class Measured:
    """Microseconds of one variant at one size, or over the stream."""

    variant: str
    size: str
    median_us: float
    p99_us: float
    runs: int
    worst_error: float


def load_config(folder: Path, provider: str) -> ModelConfig:
    """The config of a model directory, for one provider."""
    return replace(read_target(folder).settings, execution_provider=provider)


class IoBinding:
    """Eager runs on device tensors of the largest size, without graphs: what a careful model.py does."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session
        self._outputs = [node.name for node in session.get_outputs()]

    def __call__(self, inputs: Inputs) -> dict[str, Array]:
        """Copy in, run, copy out."""
        binding = self._session.io_binding()
        for name, array in inputs.items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array, "cuda", 0))
        for name in self._outputs:
            binding.bind_output(name, "cuda", 0)
        self._session.run_with_iobinding(binding)
        return dict(zip(self._outputs, binding.copy_outputs_to_cpu(), strict=True))


def plain_session(config: ModelConfig, provider: str) -> ort.InferenceSession:
    """ONNX Runtime as it comes, on one provider."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if provider == "webgpu":
        from ortgraph.providers.webgpu import find_device

        options.add_provider_for_devices([find_device()], {})
        return ort.InferenceSession(str(config.model_path), options, enable_fallback=0)
    names = {
        "cuda": [("CUDAExecutionProvider", {"cudnn_conv_algo_search": "HEURISTIC"}), "CPUExecutionProvider"],
        "cpu": ["CPUExecutionProvider"],
    }
    return ort.InferenceSession(str(config.model_path), options, providers=names[provider], enable_fallback=0)


def random_inputs(engine: Engine, sizes: Sizes, rng: np.random.Generator) -> Inputs:
    """Fresh values of the model's types, inside `value_ranges` where there are any."""
    made: Inputs = {}
    for spec in engine.signature.inputs:
        shape, storage = engine.signature.shape(spec, sizes), spec.dtype.storage
        low, high = engine.config.value_ranges.get(spec.name, (0, 100))
        if storage.kind in "iu":
            made[spec.name] = rng.integers(int(low), int(high) + 1, shape).astype(storage)
            if "mask" in spec.name:
                made[spec.name][...] = 1
        else:
            made[spec.name] = rng.standard_normal(shape).astype(storage)
    return made


def measure(
    engine: Engine,
    variants: dict[str, RunModel],
    reference: RunModel,
    sizes: Sequence[tuple[str, Sequence[Sizes]]],
    *,
    runs: int,
    rng: np.random.Generator,
) -> list[Measured]:
    """`runs` of every variant at every size, in turns; a size is a label and what its requests are drawn from.

    The first requests of each size are warm-up: they are answered by all variants and compared with the reference.
    """
    found = []
    for label, choices in sizes:
        times: dict[str, list[float]] = {name: [] for name in variants}
        errors = dict.fromkeys(variants, 0.0)
        for number in range(runs + 3):
            inputs = random_inputs(engine, choices[int(rng.integers(len(choices)))], rng)
            right = reference(inputs) if number < 3 else None
            for name, run in variants.items():
                start = time.perf_counter()
                answer = run(inputs)
                elapsed = time.perf_counter() - start
                if right is None:
                    times[name].append(elapsed * 1e6)
                    continue
                for spec in engine.signature.outputs:
                    error = worst_error(answer[spec.name], right[spec.name], spec.dtype, is_coarse=True)
                    errors[name] = max(errors[name], error)
        for name, each in times.items():
            p50, p99 = np.percentile(each, [50, 99])
            found.append(Measured(name, label, float(p50), float(p99), runs, errors[name]))
    return found


def bucket_sizes(engine: Engine) -> list[Sizes]:
    """The declared buckets."""
    grid = np.meshgrid(*(ladder or (1,) for ladder in engine.table.ladders), indexing="ij")
    return [tuple(int(axis.flat[i]) for axis in grid) for i in range(grid[0].size)]


def stream_sizes(engine: Engine, rng: np.random.Generator) -> list[Sizes]:
    """1 to the largest size of each padded dimension, one of the buckets of the others, one row."""
    made = []
    for _ in range(256):
        sizes = []
        for place, (ladder, padded) in enumerate(zip(engine.table.ladders, engine.table.padded, strict=True)):
            ladder = ladder or (1,)
            if engine.signature.is_batched and place == 0:
                sizes.append(1)
            elif padded:
                sizes.append(int(rng.integers(min(8, ladder[-1]), ladder[-1] + 1)))
            else:
                sizes.append(int(rng.choice(ladder)))
        made.append(tuple(sizes))
    return made


def plain(session: ort.InferenceSession) -> RunModel:
    """`session.run` from host arrays to host arrays."""
    names = [node.name for node in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(names, inputs), strict=True))


def through_engine(engine: Engine) -> RunModel:
    """One request, as serving runs it."""

    def run(inputs: Inputs) -> dict[str, Array]:
        answer = engine.run_batch([Request(dict(inputs))])[0]
        if isinstance(answer, RequestError):
            raise answer
        return answer

    return run


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.in_process", description=__doc__)
    parser.add_argument("folder", type=Path, help="a model directory with config.pbtxt and 1/model.onnx")
    parser.add_argument("--provider", choices=("cuda", "webgpu", "cpu"), default="cuda")
    parser.add_argument("--buckets", help="instead of the config's, in the same words")
    parser.add_argument("--runs", type=int, default=30, help="of each variant at each bucket (default: 30)")
    parser.add_argument("--stream", type=int, default=1000, help="requests of random sizes (default: 1000)")
    parser.add_argument("--output", type=Path, help="write JSON here")
    parsed = parser.parse_args(arguments)
    rng = np.random.default_rng(0)
    config = load_config(parsed.folder, parsed.provider)
    if parsed.buckets:
        written = {"parameters": {"buckets": {"string_value": parsed.buckets}}}
        config = replace(config, buckets=parse(written, model_path=config.model_path).buckets)
    cpu = plain_session(config, "cpu")
    session = plain_session(config, parsed.provider)
    start = time.perf_counter()
    engine = Engine.load(config)
    load_s = time.perf_counter() - start
    variants: dict[str, RunModel] = {"session.run": plain(session)}
    if parsed.provider == "cuda":
        variants["IO binding"] = IoBinding(session)
    variants["ortgraph"] = through_engine(engine)
    buckets = [("x".join(map(str, sizes)), [sizes]) for sizes in bucket_sizes(engine)]
    try:
        reference = plain(cpu)
        rows = measure(engine, variants, reference, buckets, runs=parsed.runs, rng=rng)
        rows += measure(
            engine, variants, reference, [("stream", stream_sizes(engine, rng))], runs=parsed.stream, rng=rng
        )
        eager = {
            dict(labels).get("reason"): count
            for (name, labels), count in engine.metrics.values().items()
            if name == "ortgraph_eager_runs_total"
        }
    finally:
        engine.close()
    dims = "x".join(dim.name for dim in engine.signature.dims)
    print(f"{parsed.folder.name} on {parsed.provider}, loaded in {load_s:.1f} s; sizes are {dims}; eager runs: {eager}")
    for note in engine.findings.notes:
        print(f"  {note}")
    print(f"{'size':>10} {'variant':12} {'median us':>10} {'p99 us':>10} {'error':>8}  against session.run")
    for row in rows:
        base = next(r for r in rows if r.size == row.size and r.variant == "session.run")
        ratio = f"{base.median_us / row.median_us:.2f}, p99 {base.p99_us / row.p99_us:.2f}"
        print(
            f"{row.size:>10} {row.variant:12} {row.median_us:10.0f} {row.p99_us:10.0f} {row.worst_error:8.1e}  {ratio}"
        )
    if parsed.output:
        command = ["in_process", *(arguments if arguments is not None else sys.argv[1:])]
        result = {
            **machine.describe(command),
            "model": parsed.folder.name,
            "provider": parsed.provider,
            "load_s": load_s,
            "eager_runs": eager,
            "notes": engine.findings.notes,
            "rows": [asdict(row) for row in rows],
        }
        result["command"] = str(result["command"]).replace("benchmarks in_process", "benchmarks.in_process")
        parsed.output.parent.mkdir(parents=True, exist_ok=True)
        parsed.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
