"""Does config.pbtxt fit the ONNX model? Says which tensor does not, the rule, and how to mend it."""

from __future__ import annotations

from collections.abc import Sequence

from .config import ModelConfig, TensorConfig
from .errors import ConfigError, nearest
from .signature import TensorSpec


def check_agreement(config: ModelConfig, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
    """Compare names, element types, number of axes and fixed sizes.

    A config without inputs and outputs (a tool's, or before Triton completed it) agrees with every model.

    Raises:
        ConfigError: the first thing that does not fit.
    """
    is_batched = config.max_batch_size > 0
    if is_batched:
        for kind, specs in (("input", inputs), ("output", outputs)):
            for spec in specs:
                _check_batch_axis(kind, spec)
    if config.inputs:
        _compare("input", config.inputs, inputs, is_batched)
        for spec in inputs:
            is_given = any(tensor.name == spec.name for tensor in config.inputs)
            if spec.is_required and not is_given and spec.name not in config.default_values:
                raise ConfigError(f"the model's input '{spec.name}' is not in config.pbtxt; add it")
    if config.outputs:
        _compare("output", config.outputs, outputs, is_batched)


def _check_batch_axis(kind: str, spec: TensorSpec) -> None:
    if kind == "input" and spec.is_required and not spec.shape:
        raise ConfigError(f"input '{spec.name}' is a scalar and has no batch axis; set max_batch_size: 0")
    if kind == "input" and spec.is_required and isinstance(spec.shape[0], int):
        raise ConfigError(
            f"input '{spec.name}' has the fixed size {spec.shape[0]} on its first axis, so the model cannot be "
            "batched; set max_batch_size: 0 and give dims with all axes, or export it with a dynamic batch"
        )


def _compare(kind: str, tensors: Sequence[TensorConfig], specs: Sequence[TensorSpec], is_batched: bool) -> None:
    known = {spec.name: spec for spec in specs}
    for tensor in tensors:
        spec = known.get(tensor.name)
        if spec is None:
            raise ConfigError(f"{kind} '{tensor.name}' is not in the model{nearest(tensor.name, known)}")
        if tensor.dtype != spec.dtype:
            raise ConfigError(
                f"{kind} '{tensor.name}': data_type is TYPE_{tensor.dtype.short}, the model has {spec.dtype.onnx_name}"
                + (f"; set TYPE_{spec.dtype.short}" if spec.dtype.triton else ", which Triton cannot carry")
            )
        wanted = spec.shape[1:] if is_batched else spec.shape
        if not wanted and tensor.dims == (1,):
            continue
        fits = len(tensor.dims) == len(wanted) and all(
            size == -1 or not isinstance(want, int) or size == want
            for size, want in zip(tensor.dims, wanted, strict=True)
        )
        # An output's declared shape may be unknown to the model (shape inference gave up): then Triton's is taken.
        if not fits and not (kind == "output" and not spec.shape):
            shown = [size if isinstance(size, int) else -1 for size in wanted]
            note = " (without the batch axis, since max_batch_size is above 0)" if is_batched else ""
            raise ConfigError(f"{kind} '{tensor.name}': dims are {list(tensor.dims)}, the model has {shown}{note}")
