"""A model's settings, parsed once from Triton's config into frozen dataclasses.

The source is the JSON that Triton hands to `initialize` (`args["model_config"]`, the protobuf ModelConfig). Keys that
Triton or its onnxruntime backend already have keep their name and meaning. An unknown key or a bad value raises
ConfigError with the key, the rule, the value got and the nearest right key.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from .dtypes import DType, from_triton
from .errors import ConfigError, nearest
from .graph_spec import GraphSpec, difference, parse_graph_specs

T = TypeVar("T")
MAX_BUCKET_SIZES = 256


@dataclass(frozen=True)
class TensorConfig:
    """One `input` or `output` entry. `dims` are without the batch axis; -1 is a dynamic size."""

    name: str
    dtype: DType
    dims: tuple[int, ...]
    is_optional: bool = False
    is_ragged: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """Everything a model needs to be served. Sizes in elements or rows, delays as Triton gives them."""

    name: str
    version: str
    model_path: Path
    max_batch_size: int = 0
    inputs: tuple[TensorConfig, ...] = ()
    outputs: tuple[TensorConfig, ...] = ()
    instance_kind: str = "CPU"
    device_id: int = 0
    preferred_batch_sizes: tuple[int, ...] = ()
    graph_level: int | None = None
    execution_provider: str = "auto"
    buckets: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    graph_specs: tuple[GraphSpec, ...] = ()
    pad_values: Mapping[str, float] = field(default_factory=dict)
    default_values: Mapping[str, float] = field(default_factory=dict)
    value_ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    padding: str = "auto"
    graph_capture: str = "auto"
    captures_on_demand: int = 0
    max_captures: int = 512
    buffer_pool_generations: int = 1
    is_debug: bool = False
    busy_wait_events: bool = False
    response_mode: str = "batch"
    batches_in_flight: int = 2
    engine_process: str = "auto"
    instances: int = 1
    takes_gpu_inputs: bool = False
    intra_op_thread_count: int | None = None
    inter_op_thread_count: int | None = None
    execution_mode: int = 0
    cpu_streams: int | None = None
    enable_mem_arena: bool = True
    enable_mem_pattern: bool = True
    notes: tuple[str, ...] = ()
    session_config: Mapping[str, str] = field(default_factory=dict)
    provider_options: Mapping[str, str] = field(default_factory=dict)
    webgpu_options: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_engine_process(self) -> bool:
        """Whether the instances on a device share one engine in a process of its own."""
        if self.engine_process != "auto":
            return self.engine_process == "on"
        is_cuda = self.execution_provider == "cuda" or (
            self.execution_provider == "auto" and self.instance_kind == "GPU"
        )
        return is_cuda and self.instances > 1 and not self._why_no_engine_process()

    def check_engine_process(self) -> None:
        """Raises ConfigError where `engine_process` is on and cannot be."""
        if self.engine_process == "on" and (reason := self._why_no_engine_process()):
            raise ConfigError(f"parameter 'engine_process' is on, but {reason}; remove it")

    def _why_no_engine_process(self) -> str:
        if self.takes_gpu_inputs:
            return "GPU tensors (FORCE_CPU_ONLY_INPUT_TENSORS: no) stay in the process that gets them"
        if names := [tensor.name for tensor in self.inputs + self.outputs if tensor.dtype.is_string]:
            return f"'{names[0]}' is a string tensor, which has no place in shared memory"
        return ""


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value not in allowed:
            raise ValueError(f"one of {', '.join(allowed)}")
        return value

    return parse


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(value: str) -> int:
        if not re.fullmatch(r"-?\d{1,12}", value) or not low <= int(value) <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return int(value)

    return parse


def _flag(value: str) -> bool:
    if value.lower() not in ("0", "1", "true", "false"):
        raise ValueError("1 or 0")
    return value.lower() in ("1", "true")


def _pairs(value: str, rule: str) -> dict[str, str]:
    """`a=1; b=2` as a dict; an empty part between two semicolons is allowed, a repeated name is not."""
    found: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in value.split(";"))):
        name, equals, text = (piece.strip() for piece in part.partition("="))
        if not equals or not name or not text or name in found:
            raise ValueError(rule)
        found[name] = text
    return found


def parse_buckets(value: str) -> dict[str, tuple[int, ...]]:
    """`batch=1,2,4; x[3]=160,320` as sizes for each dimension, ascending and without repeats."""
    rule = "'name=size,size; input[axis]=size', each size a whole number from 1 and no name twice"
    ladders: dict[str, tuple[int, ...]] = {}
    for name, text in _pairs(value, rule).items():
        sizes = [size.strip() for size in text.split(",")]
        if not all(re.fullmatch(r"\d{1,9}", size) and int(size) > 0 for size in sizes):
            raise ValueError(rule)
        ladders[name] = tuple(sorted({int(size) for size in sizes}))
        if len(ladders[name]) > MAX_BUCKET_SIZES:
            raise ValueError(f"at most {MAX_BUCKET_SIZES} sizes for a dimension")
    return ladders


def _number(text: str) -> float:
    """Whole numbers stay whole, so that those beyond 2^53 stay exact."""
    return int(text) if re.fullmatch(r"\s*[+-]?\d+\s*", text) else float(text)


def _numbers(value: str) -> dict[str, float]:
    rule = "'input=number; input=number'"
    try:
        return {name: _number(text) for name, text in _pairs(value, rule).items()}
    except ValueError:
        raise ValueError(rule) from None


def parse_ranges(value: str) -> dict[str, tuple[float, float]]:
    rule = "'input=low..high; input=low..high', both finite and low not above high"
    found = {}
    for name, text in _pairs(value, rule).items():
        low, dots, high = text.partition("..")
        try:
            found[name] = (_number(low), _number(high))
        except ValueError:
            raise ValueError(rule) from None
        if not dots or not -math.inf < found[name][0] <= found[name][1] < math.inf:
            raise ValueError(rule)
    return found


# key in `parameters` -> (field of ModelConfig, parser)
_PARAMETERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "execution_provider": ("execution_provider", _choice("auto", "cpu", "cuda", "webgpu")),
    "buckets": ("buckets", parse_buckets),
    "pad_values": ("pad_values", _numbers),
    "default_values": ("default_values", _numbers),
    "value_ranges": ("value_ranges", parse_ranges),
    "padding": ("padding", _choice("auto", "off")),
    "graph_capture": ("graph_capture", _choice("auto", "required", "off")),
    "captures_on_demand": ("captures_on_demand", _integer(0, 4096)),
    "max_captures": ("max_captures", _integer(0, 1_000_000)),
    "buffer_pool_generations": ("buffer_pool_generations", _integer(0, 64)),
    "debug": ("is_debug", _flag),
    "response_mode": ("response_mode", _choice("batch", "sender")),
    "batches_in_flight": ("batches_in_flight", _integer(1, 8)),
    "engine_process": ("engine_process", _choice("auto", "on", "off")),
    "intra_op_thread_count": ("intra_op_thread_count", _integer(0, 1024)),
    "inter_op_thread_count": ("inter_op_thread_count", _integer(0, 1024)),
    "execution_mode": ("execution_mode", _integer(0, 1)),
    "cpu_streams": ("cpu_streams", _integer(1, 64)),
    "enable_mem_arena": ("enable_mem_arena", _flag),
    "enable_mem_pattern": ("enable_mem_pattern", _flag),
}
# The onnxruntime backend's CUDA settings: kept for a provider that has them, checked by ONNX Runtime itself.
_PROVIDER_OPTIONS = frozenset(
    {
        "cudnn_conv_algo_search", "gpu_mem_limit", "arena_extend_strategy", "cudnn_conv_use_max_workspace",
        "cudnn_conv1d_pad_to_nc1d", "use_tf32", "prefer_nhwc", "fuse_conv_bias", "sdpa_kernel",
        "enable_skip_layer_norm_strict_mode",
    }
)  # fmt: skip
_NUMBERED = {
    "cudnn_conv_algo_search": ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
    "arena_extend_strategy": ("kNextPowerOfTwo", "kSameAsRequested"),
}
# The WebGPU provider's own options are written `webgpu.NAME`, or as an execution accelerator's parameters.
_WEBGPU_PREFIX = "webgpu."
_ACCELERATORS = ("cuda", "webgpu")
# Read by Triton's Python backend before this package sees the model.
_TRITON_PARAMETERS = frozenset({"FORCE_CPU_ONLY_INPUT_TENSORS", "EXECUTION_ENV_PATH"})
_SESSION_PREFIXES = ("session.", "ep.", "optimization.", "mlas.")


def _parse_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {"session_config": {}, "provider_options": {}, "webgpu_options": {}}
    for key, entry in parameters.items():
        value = _text(entry)
        if key.startswith(_SESSION_PREFIXES):
            fields["session_config"][key] = value
        elif key in _PROVIDER_OPTIONS:
            fields["provider_options"][key] = _named(key, value)
        elif key.startswith(_WEBGPU_PREFIX):
            fields["webgpu_options"][key.removeprefix(_WEBGPU_PREFIX)] = value
        elif key in _PARAMETERS:
            name, parse = _PARAMETERS[key]
            try:
                fields[name] = parse(value)
            except ValueError as rule:
                raise ConfigError(f"parameter '{key}' must be {rule}, got '{value}'") from None
        elif key not in _TRITON_PARAMETERS:
            raise ConfigError(f"unknown parameter '{key}'{nearest(key, (*_PARAMETERS, *_PROVIDER_OPTIONS))}")
    return fields


def _text(entry: Any) -> str:
    """A parameter's value."""
    return str(entry.get("string_value", "") if isinstance(entry, Mapping) else entry).strip()


def _named(key: str, value: str) -> str:
    """Triton's onnxruntime backend counts what ONNX Runtime names."""
    names = _NUMBERED.get(key, ())
    return names[int(value)] if value.isdecimal() and int(value) < len(names) else value


def _parse_accelerators(optimization: Mapping[str, Any], fields: dict[str, Any]) -> None:
    """`optimization.execution_accelerators.gpu_execution_accelerator`: the provider and its options."""
    for entry in (optimization.get("execution_accelerators") or {}).get("gpu_execution_accelerator", ()):
        name = str(entry.get("name", ""))
        if name not in _ACCELERATORS:
            raise ConfigError(f"unknown gpu_execution_accelerator '{name}'{nearest(name, _ACCELERATORS)}")
        if fields.get("execution_provider", "auto") not in ("auto", name):
            raise ConfigError(
                f"gpu_execution_accelerator '{name}' does not go with execution_provider "
                f"'{fields['execution_provider']}'; remove one of them"
            )
        if name == "webgpu":  # "cuda" is what an instance on a GPU takes anyway, and one on the CPU cannot
            fields["execution_provider"] = name
        options = fields["webgpu_options" if name == "webgpu" else "provider_options"]
        for key, value in (entry.get("parameters") or {}).items():
            if name == "cuda" and key not in _PROVIDER_OPTIONS:
                raise ConfigError(f"unknown parameter '{key}' of accelerator 'cuda'{nearest(key, _PROVIDER_OPTIONS)}")
            options[key] = _named(key, str(value).strip())


def _parse_cuda(
    cuda: Mapping[str, Any], max_batch_size: int, fields: Mapping[str, Any], notes: list[str]
) -> tuple[GraphSpec, ...]:
    """`optimization.cuda`: the graphs to capture; whether any is captured is said by `graph_capture`, not `graphs`."""
    if cuda.get("output_copy_stream"):
        notes.append(
            "optimization.cuda.output_copy_stream has no effect: outputs are copied in the order of the model's one "
            "stream, while the next batch is staged"
        )
    specs = parse_graph_specs(cuda.get("graph_spec") or (), max_batch_size)
    if specs and fields.get("buckets"):
        notes.append("optimization.cuda.graph_spec is not used, since the parameter buckets is given")
        return ()
    if specs and (note := difference(specs, is_padded=fields.get("padding") != "off")):
        notes.append(note)
    return specs


def _check_capture(fields: Mapping[str, Any]) -> None:
    if fields.get("graph_capture") == "off" and fields.get("captures_on_demand"):
        raise ConfigError("parameter 'captures_on_demand' needs graph capture, but 'graph_capture' is off; remove one")


def _parse_tensor(kind: str, entry: Mapping[str, Any], is_batched: bool) -> TensorConfig:
    name, type_name = str(entry["name"]), str(entry["data_type"])
    dtype = from_triton(type_name)
    if dtype is None:
        raise ConfigError(f"{kind} '{name}': data_type {type_name} is not known")
    if entry.get("is_shape_tensor"):
        raise ConfigError(f"{kind} '{name}': is_shape_tensor is for TensorRT; remove it")
    if kind == "output" and entry.get("reshape"):
        raise ConfigError(f"output '{name}': reshape is not supported; give the model's own dims")
    shape = entry.get("reshape", {}).get("shape") if entry.get("reshape") else entry.get("dims", ())
    dims = tuple(int(size) for size in shape or ())
    return TensorConfig(
        name, dtype, dims, bool(entry.get("optional")), bool(entry.get("allow_ragged_batch")) and is_batched
    )


def _notes(batching: Mapping[str, Any]) -> list[str]:
    """What is allowed but will disappoint.

    Triton prefetches batches only without time-outs and queue limits (PriorityQueue::SupportPrefetching in its core);
    without, its batcher is not told when the model is free again, and may sleep its default wait of 500 ms.
    """
    policy = batching.get("default_queue_policy") or {}
    limits = ("default_timeout_microseconds", "allow_timeout_override", "max_queue_size")
    found = [key for key in limits if policy.get(key) not in (None, 0, "0", False)]
    if not found and not int(batching.get("priority_levels") or 0):
        return []
    cause = f"default_queue_policy.{found[0]}" if found else "priority_levels"
    return [
        f"dynamic_batching.{cause} makes Triton's batcher pause up to 500 ms between batches; remove it for a low P99"
    ]


def _instances(groups: Iterable[Mapping[str, Any]], device_id: int) -> int:
    """How many instances of `instance_group` are on this GPU; elsewhere 1, however many there are."""
    found = sum(int(group.get("count", 1)) for group in groups if device_id in map(int, group.get("gpus") or ()))
    return max(found, 1)


def parse(
    model_config: Mapping[str, Any] | str, *, model_path: Path, version: str = "1", **instance: Any
) -> ModelConfig:
    """Parse Triton's ModelConfig (JSON text or its dict) for the ONNX file at `model_path`.

    Args:
        instance: `instance_kind` ("CPU", "GPU") and `device_id`, as Triton's `initialize` gives them.

    Raises:
        ConfigError: a value is wrong, a key is unknown, or a feature is asked for that cannot be combined with this.
    """
    raw: Mapping[str, Any] = json.loads(model_config) if isinstance(model_config, str) else model_config
    if raw.get("model_transaction_policy", {}).get("decoupled"):
        raise ConfigError("model_transaction_policy.decoupled: every request has one answer here; remove it")
    if raw.get("sequence_batching"):
        raise ConfigError("sequence_batching is not supported; pass the state as an input and an output")
    if raw.get("batch_input") or raw.get("batch_output"):
        raise ConfigError("batch_input and batch_output are not supported; ragged inputs are padded instead")
    optimization = raw.get("optimization", {})
    level = optimization.get("graph", {}).get("level")
    if level is not None and level not in (-1, 0, 1, 2):
        raise ConfigError(f"optimization.graph.level must be -1, 1 or 2, got {level}")
    cuda = optimization.get("cuda") or {}
    max_batch_size = int(raw.get("max_batch_size", 0))
    batching = raw.get("dynamic_batching") or {}
    fields = _parse_parameters(raw.get("parameters", {}))
    notes = _notes(batching)
    if too_large := [size for size in fields.get("buckets", {}).get("batch", ()) if size > max_batch_size > 0]:
        notes.append(f"batch sizes {', '.join(map(str, too_large))} in buckets are beyond max_batch_size and not used")
    _parse_accelerators(optimization, fields)
    _check_capture(fields)
    graph_specs = _parse_cuda(cuda, max_batch_size, fields, notes)
    required = {entry["name"] for entry in raw.get("input", ()) if not entry.get("optional")}
    for name in sorted(required & fields.get("default_values", {}).keys()):
        notes.append(f"default_values of '{name}' are not used: Triton wants that input; mark it optional: true")
    config = ModelConfig(
        name=str(raw.get("name", model_path.parent.parent.name)),
        version=version,
        model_path=model_path,
        max_batch_size=max_batch_size,
        inputs=tuple(_parse_tensor("input", entry, max_batch_size > 0) for entry in raw.get("input", ())),
        outputs=tuple(_parse_tensor("output", entry, max_batch_size > 0) for entry in raw.get("output", ())),
        preferred_batch_sizes=tuple(int(size) for size in batching.get("preferred_batch_size", ())),
        graph_level=level,
        graph_specs=graph_specs,
        notes=tuple(notes),
        busy_wait_events=bool(cuda.get("busy_wait_events")),
        instances=_instances(raw.get("instance_group", ()), instance.get("device_id", 0)),
        takes_gpu_inputs=_text(raw.get("parameters", {}).get("FORCE_CPU_ONLY_INPUT_TENSORS", "yes")).lower() == "no",
        **instance,
        **fields,
    )
    config.check_engine_process()
    return config
