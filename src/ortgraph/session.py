"""Make an ONNX Runtime session from a config, with errors that say what to change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnxruntime as ort

from .config import ModelConfig
from .dtypes import from_ort
from .errors import ConfigError, ModelError, first_line
from .signature import TensorSpec

ort.set_default_logger_severity(3)  # it warns of every CUDA session; what matters is raised
# optimization.graph.level as Triton's onnxruntime backend reads it: -1 basic, 1 extended, 2 none; else everything.
_LEVELS = {
    -1: ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    1: ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
}
_HINTS = (
    ("official support for domain", "re-export the model with an older opset, or install a newer onnxruntime"),
    ("Unsupported model IR version", "re-export the model with an older IR version, or install a newer onnxruntime"),
    ("external data", "put the model's external data file beside model.onnx"),
    ("External data", "put the model's external data file beside model.onnx"),
    ("No graph was found", "the file is not an ONNX model, or is cut short; copy it again"),
    ("Protobuf parsing failed", "the file is not an ONNX model, or is cut short; copy it again"),
    ("find an implementation for", "re-export with another opset or element type, or install a newer onnxruntime"),
    ("No Op registered for", "the operator needs a custom library or a newer onnxruntime"),
    ("is not a registered function/op", "the operator needs a custom library or a newer onnxruntime"),
    ("not currently registered or supported", "ONNX Runtime has no such element type"),
)


def session_options(config: ModelConfig) -> ort.SessionOptions:
    """ONNX Runtime's session options of a model.

    Raises:
        ConfigError: ONNX Runtime refuses a `session.*` or `ep.*` entry.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors are raised as well; logged, a client could fill the log with them
    if config.graph_level in _LEVELS:
        options.graph_optimization_level = _LEVELS[config.graph_level]
    if config.intra_op_thread_count is not None:
        options.intra_op_num_threads = config.intra_op_thread_count
    if config.inter_op_thread_count is not None:
        options.inter_op_num_threads = config.inter_op_thread_count
    if config.execution_mode == 1:
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    options.enable_cpu_mem_arena = config.enable_mem_arena
    options.enable_mem_pattern = config.enable_mem_pattern
    for key, value in config.session_config.items():
        try:
            options.add_session_config_entry(key, value)
        except Exception as error:
            raise ConfigError(f"parameter '{key}' was refused by ONNX Runtime: {first_line(error)}") from error
    return options


def open_session(config: ModelConfig, options: ort.SessionOptions, providers: Sequence[Any]) -> ort.InferenceSession:
    """Load the model file; without `providers` on those that `options` names.

    Raises:
        ModelError: the file is missing or ONNX Runtime cannot load it; the message says why in one line.
    """
    path = config.model_path
    if not path.is_file():
        raise ModelError(f"{path.name} is missing in {path.parent}; put the ONNX model there")
    try:
        # Without the fallback: it would serve on the CPU what was meant for a GPU, and say so only on stdout.
        return ort.InferenceSession(str(path), options, providers=list(providers) or None, enable_fallback=0)
    except Exception as error:
        reason = first_line(error)
        hint = next((hint for sign, hint in _HINTS if sign in str(error)), "")
        raise ModelError(f"ONNX Runtime cannot load {path.name}: {reason}{'; ' + hint if hint else ''}") from error


def gpu_reason(error: Exception, config: ModelConfig) -> str:
    """ONNX Runtime's message about a model on a GPU in one line, with what to change where its arena had no memory."""
    text, limit = first_line(error), config.provider_options.get("gpu_mem_limit")
    if limit and "Available memory of" in text:
        return f"{text}; raise the parameter gpu_mem_limit, now {limit} bytes"
    if "Failed to allocate memory for requested buffer" in text:
        return f"{text}; the GPU's memory is full"
    return text


def specs(session: ort.InferenceSession) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...], tuple[str, ...]]:
    """A session's inputs (initializers that may be overridden are optional ones), outputs, and what is no tensor.

    Raises:
        ModelError: strings and types that numpy lacks come together.
    """
    strange: list[str] = []

    def read(nodes: Sequence[Any], is_required: bool) -> tuple[TensorSpec, ...]:
        found = []
        for node in nodes:
            dtype = from_ort(node.type)
            if dtype is None:
                strange.append(f"'{node.name}' is {node.type}")
            else:
                shape = tuple(size if isinstance(size, int) and size >= 0 else (size or None) for size in node.shape)
                shape = tuple(None if isinstance(size, int) and size < 0 else size for size in shape)
                found.append(TensorSpec(node.name, dtype, shape, is_required))
        return tuple(found)

    inputs = read(session.get_inputs(), True) + read(session.get_overridable_initializers(), False)
    outputs = read(session.get_outputs(), True)
    raw = [spec for spec in inputs + outputs if spec.dtype.is_raw]
    if raw and any(spec.dtype.is_string for spec in inputs + outputs):
        raise ModelError(
            f"'{raw[0].name}' is {raw[0].dtype.short} beside string tensors; ONNX Runtime's Python API cannot pass "
            "both to one model; cast one of them inside the model"
        )
    return inputs, outputs, tuple(strange)
