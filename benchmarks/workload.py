"""The workload of the GPU benchmark: a BERT-base-size fp16 encoder with random weights, as model repositories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from models.encoder_spec import BERT_BASE_FP16, EncoderSpec

MODEL = "bert"
SEQUENCE = "16,32,64,96,128"
# For a look at what a command does on a machine without a GPU.
TINY = EncoderSpec(layers=1, hidden=64, heads=2, intermediate=128, fused=False)
_CONFIG = """
backend: "python"
max_batch_size: 32
input [
  {{ name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true }},
  {{ name: "attention_mask" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true }}
]
output [ {{ name: "embedding" data_type: {data_type} dims: [ {hidden} ] }} ]
instance_group [ {{ count: {instances} {kind} }} ]
dynamic_batching {{ }}
optimization {{ cuda {{ busy_wait_events: true }} }}
parameters {{
  key: "buckets"
  value: {{ string_value: "batch=1,2,3,4,6,7,8,10,12,14,16,20,24,28,32; sequence={sequence}" }}
}}
parameters {{ key: "value_ranges" value: {{ string_value: "input_ids=0..30521; attention_mask=0..1" }} }}
"""


def write(
    folder: Path,
    *,
    is_fused: bool,
    instances: Sequence[int],
    seed: int = 0,
    is_tiny: bool = False,
    sequence: str = SEQUENCE,
) -> dict[int, Path]:
    """A model repository for each number of instances, all with the same model; built once.

    Args:
        is_fused: with ONNX Runtime's fused operators, else with ONNX's own.
        is_tiny: TINY on the CPU instead.
        sequence: the bucket sizes of the sequence.
    """
    import onnx

    from models.encoder import build

    spec = TINY if is_tiny else replace(BERT_BASE_FP16, fused=is_fused)
    folder = folder / ("tiny" if is_tiny else "fused" if is_fused else "plain")
    model = folder / "model.onnx"
    if not model.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        onnx.save(build(spec, seed), model)
    repositories = {}
    for count in instances:
        name = f"instances_{count}" + ("" if sequence == SEQUENCE else f"_sequence_{sequence.replace(',', '_')}")
        version = folder / name / MODEL / "1"
        version.mkdir(parents=True, exist_ok=True)
        config = _CONFIG.format(
            instances=count,
            kind="kind: KIND_CPU" if is_tiny else "kind: KIND_GPU gpus: [ 0 ]",
            data_type="TYPE_FP16" if spec.dtype == "fp16" else "TYPE_FP32",
            hidden=spec.hidden,
            sequence=sequence,
        )
        if is_tiny and count > 1:
            config += 'parameters { key: "engine_process" value: { string_value: "on" } }\n'  # as on a GPU
        (version.parent / "config.pbtxt").write_text(config)
        (version / "model.py").write_text("from ortgraph.backend import TritonPythonModel  # noqa: F401\n")
        (version / "model.onnx").unlink(missing_ok=True)
        (version / "model.onnx").symlink_to(model.resolve())
        repositories[count] = folder / name
    return repositories
