"""config.pbtxt as Triton's own message, read and written whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from google.protobuf import json_format, text_format  # type: ignore[import-untyped]
from tritonclient.grpc.model_config_pb2 import ModelConfig as TritonConfig

from .. import config
from .files import CommandError


def read(path: Path) -> TritonConfig:
    """A config.pbtxt as Triton's `inference.ModelConfig`; comments are lost.

    Raises:
        CommandError: there is no such file, or it breaks the schema; with the line and what is wrong there.
    """
    try:
        written = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise CommandError(f"there is no file {path}") from error
    except UnicodeDecodeError as error:
        raise CommandError(f"{path} is not a config.pbtxt: it is not UTF-8 text") from error
    found = TritonConfig()
    try:
        text_format.Parse(written, found)
    except text_format.ParseError as error:
        raise CommandError(f"{path} is not a config.pbtxt: {str(error).splitlines()[0]}") from error
    return found


def text(written: TritonConfig) -> str:
    """The text of a config.pbtxt: Triton's order of fields, short lists, parameters by name."""
    shown: str = text_format.MessageToString(written, use_index_order=True, use_short_repeated_primitives=True)
    return shown


def settings(written: TritonConfig, model_path: Path, *, kind: str = "CPU", version: str = "1") -> config.ModelConfig:
    """The settings that the serving process would read from this config, for the ONNX file at `model_path`.

    Args:
        kind: of the instance, "CPU" or "GPU".

    Raises:
        ConfigError: as in the serving process.
    """
    raw: dict[str, Any] = json.loads(
        json_format.MessageToJson(written, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    )
    return config.parse(raw, model_path=model_path, version=version, instance_kind=kind)


def parameter(written: TritonConfig, key: str) -> str:
    """The value of an entry of `parameters`; empty where there is none."""
    return str(written.parameters[key].string_value) if key in written.parameters else ""


def set_parameter(written: TritonConfig, key: str, value: str) -> None:
    """Set an entry of `parameters`; an empty value removes it."""
    if value:
        written.parameters[key].string_value = value
    else:
        written.parameters.pop(key, None)
