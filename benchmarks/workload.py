"""The workload of the GPU benchmark: a BERT-base-size fp16 encoder with random weights, as model repositories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

MODEL = "bert"
_CONFIG = """
backend: "python"
max_batch_size: 32
input [
  {{ name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true }},
  {{ name: "attention_mask" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true }}
]
output [ {{ name: "embedding" data_type: TYPE_FP16 dims: [ 768 ] }} ]
instance_group [ {{ count: {instances} kind: KIND_GPU gpus: [ 0 ] }} ]
dynamic_batching {{ }}
optimization {{ cuda {{ busy_wait_events: true }} }}
parameters {{
  key: "buckets"
  value: {{ string_value: "batch=1,2,3,4,6,7,8,10,12,14,16,20,24,28,32; sequence=16,32,64,96,128" }}
}}
parameters {{ key: "value_ranges" value: {{ string_value: "input_ids=0..30521; attention_mask=0..1" }} }}
"""


def write(folder: Path, *, is_fused: bool, instances: Sequence[int], seed: int = 0) -> dict[int, Path]:
    """A model repository for each number of instances, all with the same model; built once.

    Args:
        is_fused: with ONNX Runtime's fused operators, else with ONNX's own.
    """
    import onnx

    from models.encoder import build
    from models.encoder_spec import BERT_BASE_FP16

    folder = folder / ("fused" if is_fused else "plain")
    model = folder / "model.onnx"
    if not model.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        onnx.save(build(replace(BERT_BASE_FP16, fused=is_fused), seed), model)
    repositories = {}
    for count in instances:
        version = folder / f"instances_{count}" / MODEL / "1"
        version.mkdir(parents=True, exist_ok=True)
        (version.parent / "config.pbtxt").write_text(_CONFIG.format(instances=count))
        (version / "model.py").write_text("from ortgraph.backend import TritonPythonModel  # noqa: F401\n")
        (version / "model.onnx").unlink(missing_ok=True)
        (version / "model.onnx").symlink_to(model.resolve())
        repositories[count] = folder / f"instances_{count}"
    return repositories
