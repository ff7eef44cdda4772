"""Execution providers behind one seam (base.py). Only this file knows their names."""

from __future__ import annotations

from ..config import ModelConfig
from ..errors import ConfigError
from ..metrics import Metrics
from .base import Provider, Run, Slot

__all__ = ["Provider", "Run", "Slot", "open_checked", "open_provider"]


def open_provider(config: ModelConfig, metrics: Metrics | None = None) -> Provider:
    """Load the model on the provider its config asks for; captures and buffers are counted in `metrics`.

    Raises:
        ConfigError: a setting is refused by ONNX Runtime.
        ModelError: the ONNX file is missing, broken or uses something that ONNX Runtime lacks.
    """
    name = config.execution_provider
    if name == "cuda" or (name == "auto" and config.instance_kind == "GPU"):
        from .cuda import CudaProvider

        return CudaProvider(config, metrics)
    if name == "webgpu":
        from .webgpu import WebGpuProvider

        return WebGpuProvider(config, metrics)
    if config.graph_capture == "required":
        raise ConfigError("parameter 'graph_capture' is required, but the CPU captures no graphs; use a GPU or 'auto'")
    from .cpu import CpuProvider

    return CpuProvider(config, metrics)


def open_checked(config: ModelConfig) -> Provider:
    """Load the model where an index outside its table is an error, not a look at foreign memory: on the CPU.

    Raises:
        ModelError: it cannot run there.
    """
    from .cpu import CpuProvider

    return CpuProvider(config)
