"""The model that `profile` and `tune` are to measure, found and read as the serving process would."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config import ModelConfig, parse_buckets
from . import pbtxt
from .files import CommandError

TritonConfig = Any  # tritonclient's message, which has no types


@dataclass(frozen=True)
class Target:
    """A model: its name, its ONNX file, its config.pbtxt's path and message (None for a bare file), its settings."""

    name: str
    model_path: Path
    config_path: Path | None
    written: TritonConfig
    settings: ModelConfig


def read_target(path: Path) -> Target:
    """An ONNX file, or a model directory with its config.pbtxt and the highest version's ONNX file.

    Raises:
        CommandError: it is neither, or the ONNX file is missing.
        ConfigError: a setting is wrong, as in the serving process.
    """
    if path.is_file():
        return Target(path.stem, path, None, None, ModelConfig(path.stem, "1", path))
    if not path.is_dir():
        raise CommandError(f"there is no file or folder {path}")
    written = pbtxt.read(path / "config.pbtxt")
    versions = sorted((v for v in path.iterdir() if v.is_dir() and v.name.isdecimal()), key=lambda v: int(v.name))
    file_name = written.default_model_filename
    file_name = file_name if file_name.endswith(".onnx") else "model.onnx"
    found = [version / file_name for version in versions if (version / file_name).is_file()]
    if not found:
        raise CommandError(f"{path} has no version folder with a {file_name}, such as 1/{file_name}")
    name = written.name or path.resolve().name
    settings = pbtxt.settings(written, found[-1], kind=instance_kind(written), version=found[-1].parent.name)
    return Target(name, found[-1], path / "config.pbtxt", written, replace(settings, name=name))


def has_nvidia_gpu() -> bool:
    """Whether the NVIDIA driver is loaded here."""
    return Path("/dev/nvidiactl").exists()


def instance_kind(written: TritonConfig) -> str:
    """ "GPU" or "CPU", as Triton would choose on this machine."""
    groups = written.instance_group
    is_cpu = bool(groups) and groups[0].kind == groups[0].KIND_CPU
    return "CPU" if is_cpu or not has_nvidia_gpu() else "GPU"


def parse_sizes(text: str) -> dict[str, int]:
    """`batch=8; sequence=64` as one size for each dimension.

    Raises:
        CommandError: it is written in another way, or a dimension has several sizes.
    """
    try:
        ladders = parse_buckets(text)
    except ValueError as rule:
        raise CommandError(f"--sizes must be {rule}, got '{text}'") from None
    several = [name for name, sizes in ladders.items() if len(sizes) > 1]
    if several:
        raise CommandError(f"--sizes takes one size for each dimension, got several for '{several[0]}'")
    return {name: sizes[0] for name, sizes in ladders.items()}
