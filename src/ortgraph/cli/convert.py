"""`ortgraph convert`: a model directory of Triton's onnxruntime backend becomes one of ours, and back.

What the onnxruntime backend reads was taken from its README and src/onnxruntime.cc (June 2026).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import config as settings
from . import pbtxt
from .console import console
from .files import CommandError, load_model, new_folder, reported
from .progress import steps
from .proposal import check, instance_kind


class Target(StrEnum):
    """Whose model directory to make."""

    ortgraph = "ortgraph"
    onnxruntime = "onnxruntime"


Source = Annotated[
    Path, typer.Argument(metavar="MODEL_DIRECTORY", help="With config.pbtxt and 1/.", show_default=False)
]
New = Annotated[Path, typer.Argument(metavar="NEW_DIRECTORY", help="Made; the old one stays.", show_default=False)]
To = Annotated[Target, typer.Option(help="ortgraph, or onnxruntime to go back.")]
Force = Annotated[bool, typer.Option("--force", help="Replace NEW_DIRECTORY, which may be MODEL_DIRECTORY itself.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]

# Numbers of the onnxruntime backend -> names of ONNX Runtime's CUDA provider.
_ENUMS = {
    "cudnn_conv_algo_search": ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
    "arena_extend_strategy": ("kNextPowerOfTwo", "kSameAsRequested"),
}
_BOTH_READ = frozenset(
    {"intra_op_thread_count", "inter_op_thread_count", "execution_mode", "enable_mem_arena", "enable_mem_pattern"}
    | {"gpu_mem_limit", "session.use_device_allocator_for_initializers", *_ENUMS}
)
_OURS = frozenset(settings._PARAMETERS) | settings._PROVIDER_OPTIONS
_NOT_OURS = {
    "memory.enable_memory_arena_shrinkage": "runs have no such option here; buckets bound the memory instead",
    "do_copy_in_default_stream": "copies are on the model's own stream here",
}
_HOST_ONLY = "the Python backend moves tensors through shared memory"
_OPTIMIZATION = {
    "priority": "the model has one stream of its own",
    "input_pinned_memory": _HOST_ONLY,
    "output_pinned_memory": _HOST_ONLY,
    "gather_kernel_buffer_threshold": _HOST_ONLY,
}
_CUDA_BLOCK = {
    "graphs": "graphs are captured wherever they can be; see graph_capture",
    "output_copy_stream": "one stream copies and runs",
}
_NOT_READ = "the onnxruntime backend does not read it"
_READ_NOW = "the onnxruntime backend did not read it, and it counts now"
_MODEL_PY = "from ortgraph.backend import TritonPythonModel"


@dataclass
class Conversion:
    """The new config, and what became of every setting: text that names it and says what was done."""

    config: pbtxt.TritonConfig
    changed: list[str] = field(default_factory=list)
    not_applicable: list[str] = field(default_factory=list)

    def drop(self, setting: str, why: str) -> None:
        """A setting that the other side does not have."""
        self.not_applicable.append(f"{setting}: {why}")


def convert(
    model_directory: Source,
    new_directory: New,
    to: To = Target.ortgraph,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Take over a model of Triton's onnxruntime backend. Example: ortgraph convert models/bert converted/bert"""
    with reported():
        config = _read(model_directory)
        if model_directory.resolve() in new_directory.resolve().parents:
            raise CommandError(f"{new_directory} lies inside {model_directory}; name a folder beside it")
        before = _settings_of(config)
        conversion = (to_ortgraph if to is Target.ortgraph else to_onnxruntime)(config)
        config.name = config.name and new_directory.resolve().name
        versions = _versions(model_directory)
        served = _served(config, versions)
        with steps(1 + len(served)) as step, new_folder(new_directory, force=force) as folder:
            step("copying")
            _copy(model_directory, folder, conversion, to)
            (folder / "config.pbtxt").write_text(pbtxt.text(config), encoding="utf-8")
            for version in served:
                step(f"checking version {version}")
                _check(conversion, folder / str(version), to)
    kept = [name for name, value in _settings_of(config).items() if before.get(name) == value]
    _report(conversion, kept, versions, new_directory, to, as_json)


def _read(folder: Path) -> pbtxt.TritonConfig:
    """A directory's config; an empty one where there is no config.pbtxt, as Triton then completes it."""
    if not folder.is_dir():
        raise CommandError(f"there is no model directory {folder}")
    if not _versions(folder):
        raise CommandError(f"{folder} is not a model directory: it has no version folder such as 1/")
    path = folder / "config.pbtxt"
    return pbtxt.read(path) if path.exists() else pbtxt.TritonConfig()


def _versions(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.is_dir() and re.fullmatch(r"[1-9]\d*", path.name))


def _served(config: pbtxt.TritonConfig, versions: list[int]) -> list[int]:
    """The versions that Triton's version_policy takes: the latest one unless it says otherwise."""
    policy = config.version_policy
    if policy.HasField("all"):
        return versions
    if policy.HasField("specific"):
        return [version for version in versions if version in policy.specific.versions]
    return versions[-max(policy.latest.num_versions, 1) :]


def _settings_of(config: pbtxt.TritonConfig) -> dict[str, str]:
    """What a config sets, by name, with its value as text."""
    found: dict[str, str] = {}
    for descriptor, value in config.ListFields():
        if descriptor.name == "parameters":
            found |= {f"parameter {key}": value[key].string_value for key in sorted(value)}
        elif descriptor.name == "optimization":
            found |= {f"optimization.{inner.name}": str(content) for inner, content in value.ListFields()}
        elif descriptor.name not in ("name", "platform", "backend", "runtime"):
            found[descriptor.name] = str(value)
    return found


def to_ortgraph(config: pbtxt.TritonConfig) -> Conversion:
    """Change a config of the onnxruntime backend into ours, in place.

    Raises:
        CommandError: it is another backend's, or uses what is not offered here.
    """
    backend = config.backend or ("onnxruntime" if config.platform in ("", "onnxruntime_onnx") else config.platform)
    if backend != "onnxruntime":
        raise CommandError(f"the model's backend is '{backend}', not onnxruntime" + _hint(config, "onnxruntime"))
    _refuse_what_we_lack(config)
    conversion = Conversion(config)
    config.ClearField("platform")
    config.backend = "ortgraph"
    if config.runtime:
        conversion.drop(f'runtime "{config.runtime}"', "it names the onnxruntime backend's library")
        config.ClearField("runtime")
    if config.cc_model_filenames:
        conversion.drop("cc_model_filenames", "one file serves every GPU: the one of default_model_filename")
        config.ClearField("cc_model_filenames")
    _convert_outputs(config, conversion)
    _convert_optimization(config, conversion)
    for key in sorted(config.parameters):
        value = pbtxt.parameter(config, key)
        names = _ENUMS.get(key)
        if names and value.isdigit() and int(value) < len(names):
            pbtxt.set_parameter(config, key, names[int(value)])
            conversion.changed.append(f"parameter {key}: {value} is now {names[int(value)]}, ONNX Runtime's own name")
        elif key in _NOT_OURS or not (key in _OURS or key.startswith(settings._SESSION_PREFIXES)):
            conversion.drop(f"parameter {key}", _NOT_OURS.get(key, "nothing here reads it"))
            pbtxt.set_parameter(config, key, "")
        elif key not in _BOTH_READ:
            conversion.changed.append(f"parameter {key}: {_READ_NOW}")
    return conversion


def _hint(config: pbtxt.TritonConfig, wanted: str) -> str:
    if wanted == "onnxruntime" and config.backend in ("ortgraph", "python"):
        return "; to go back, give --to onnxruntime"
    return ""


def _refuse_what_we_lack(config: pbtxt.TritonConfig) -> None:
    cannot = (
        ("sequence_batching", config.HasField("sequence_batching"), "pass the state as an input and an output"),
        ("batch_input and batch_output", config.batch_input or config.batch_output, "inputs are padded here"),
        ("model_operations.op_library_filename", config.model_operations.op_library_filename, "no custom operators"),
        ("ensemble_scheduling", config.HasField("ensemble_scheduling"), "convert its models one by one"),
    )
    for name, is_used, why in cannot:
        if is_used:
            raise CommandError(f"config.pbtxt uses {name}, which is not offered here: {why}")
    for entry in config.input:
        if entry.allow_ragged_batch:
            raise CommandError(
                f"input '{entry.name}' has allow_ragged_batch, which lays requests end to end in one row; "
                "that is not offered here: export the model with rows, and they are padded"
            )


def _convert_outputs(config: pbtxt.TritonConfig, conversion: Conversion) -> None:
    for entry in config.output:
        if entry.HasField("reshape"):
            shape, dims = list(entry.reshape.shape), list(entry.dims)
            conversion.drop(f"output {entry.name}: reshape", f"clients get {shape} instead of {dims} (after the batch)")
            entry.ClearField("reshape")
            entry.ClearField("dims")
            entry.dims.extend(shape or [1])


def _convert_optimization(config: pbtxt.TritonConfig, conversion: Conversion) -> None:
    """The graph level stays; CUDA options move to `parameters`, which count only where there is a GPU."""
    optimization = config.optimization
    for name, why in _OPTIMIZATION.items():
        if optimization.HasField(name) if name.endswith("memory") else getattr(optimization, name):
            conversion.drop(f"optimization.{name}", why)
            optimization.ClearField(name)
    for descriptor, _ in list(optimization.cuda.ListFields()):
        if descriptor.name in _CUDA_BLOCK:
            conversion.drop(f"optimization.cuda.{descriptor.name}", _CUDA_BLOCK[descriptor.name])
            optimization.cuda.ClearField(descriptor.name)
        else:
            conversion.changed.append(f"optimization.cuda.{descriptor.name}: {_READ_NOW}")
    if not optimization.cuda.ListFields():
        optimization.ClearField("cuda")
    accelerators = optimization.execution_accelerators
    for accelerator in accelerators.gpu_execution_accelerator:
        where = f"gpu_execution_accelerator {accelerator.name}"
        if accelerator.name != "cuda":
            conversion.drop(where, "models run on ONNX Runtime's CUDA, WebGPU or CPU provider here")
            continue
        for key, value in sorted(accelerator.parameters.items()):
            if key in settings._PROVIDER_OPTIONS:
                pbtxt.set_parameter(config, key, value)
                conversion.changed.append(f"{where}: {key} is now a parameter, which counts only on a GPU")
            else:
                conversion.drop(f"{where}: {key}", "not among the CUDA options here")
    for accelerator in accelerators.cpu_execution_accelerator:
        conversion.drop(f"cpu_execution_accelerator {accelerator.name}", "the CPU provider runs models on a CPU here")
    optimization.ClearField("execution_accelerators")
    if not optimization.ListFields():
        config.ClearField("optimization")


def to_onnxruntime(config: pbtxt.TritonConfig) -> Conversion:
    """Change a config of ours into one of the onnxruntime backend, in place.

    Raises:
        CommandError: it is another backend's.
    """
    if config.backend not in ("ortgraph", "python"):
        raise CommandError(f"the model's backend is '{config.backend or config.platform}', not ortgraph")
    conversion = Conversion(config)
    config.backend = "onnxruntime"
    for entry in config.input:
        if entry.allow_ragged_batch:
            conversion.drop(f"input {entry.name}: allow_ragged_batch", "requests of different sizes run apart there")
            entry.ClearField("allow_ragged_batch")
        if entry.optional and config.max_batch_size:
            conversion.drop(f"input {entry.name}: optional", "not together with batching there; requests must send it")
            entry.ClearField("optional")
    provider = pbtxt.parameter(config, "execution_provider")
    if provider in ("cpu", "cuda"):
        kind = "KIND_CPU" if provider == "cpu" else "KIND_GPU"
        for group in config.instance_group or [config.instance_group.add(count=1)]:
            group.kind = group.Kind.Value(kind)
        conversion.changed.append(f"parameter execution_provider: {provider} is now instance_group kind {kind}")
        pbtxt.set_parameter(config, "execution_provider", "")
    for key in sorted(config.parameters):
        value = pbtxt.parameter(config, key)
        names = _ENUMS.get(key, ())
        if value in names:
            pbtxt.set_parameter(config, key, str(names.index(value)))
            conversion.changed.append(f"parameter {key}: {value} is now {names.index(value)}, as written there")
        elif key not in _BOTH_READ:
            conversion.drop(f"parameter {key}", _NOT_READ)
            pbtxt.set_parameter(config, key, "")
    optimization = config.optimization
    for descriptor, _ in list(optimization.cuda.ListFields()):
        conversion.drop(f"optimization.cuda.{descriptor.name}", _NOT_READ)
    optimization.ClearField("cuda")
    accelerators = [a for a in optimization.execution_accelerators.gpu_execution_accelerator if a.name == "cuda"]
    for accelerator in optimization.execution_accelerators.gpu_execution_accelerator:
        if accelerator.name != "cuda":
            conversion.drop(f"gpu_execution_accelerator {accelerator.name}", "the onnxruntime backend has none")
    optimization.execution_accelerators.ClearField("gpu_execution_accelerator")
    optimization.execution_accelerators.gpu_execution_accelerator.extend(accelerators)
    if not optimization.execution_accelerators.ListFields():
        optimization.ClearField("execution_accelerators")
    if not optimization.ListFields():
        config.ClearField("optimization")
    return conversion


def _copy(source: Path, folder: Path, conversion: Conversion, to: Target) -> None:
    """Everything of the model directory but its config, the model file under a name that the other side takes."""
    for place, _, names in os.walk(source, followlinks=True):
        inside = folder / Path(place).relative_to(source)
        inside.mkdir(exist_ok=True)
        for name in names:  # not shutil.copytree: it hides why a file could not be copied
            shutil.copyfile(Path(place) / name, inside / name)
    (folder / "config.pbtxt").unlink(missing_ok=True)
    config, renamed = conversion.config, False
    for version in _versions(folder):
        where = folder / str(version)
        if to is Target.onnxruntime:
            script = where / "model.py"
            if script.is_file() and _MODEL_PY in script.read_text(encoding="utf-8"):
                script.unlink()
            continue
        renamed = _place_model(where, config.default_model_filename or "model.onnx") or renamed
    if renamed:
        conversion.changed.append(
            f"default_model_filename: {config.default_model_filename or 'model.onnx'} is now model.onnx"
        )
        config.ClearField("default_model_filename")


def _place_model(version: Path, name: str) -> bool:
    """A model file whose name does not end in .onnx, or lies in a folder of that name, becomes model.onnx."""
    found = version / name
    if found.is_dir():
        inside = found.rename(version / ".unpacked")
        for path in inside.iterdir():
            path.rename(version / path.name)
        inside.rmdir()
        return True
    if found.is_file() and not name.endswith(".onnx"):
        found.rename(version / "model.onnx")
        return True
    return False


def _check(conversion: Conversion, version: Path, to: Target) -> None:
    """The new directory's model loads, and what differs between the backends in joining requests is said."""
    config = conversion.config
    path = version / (config.default_model_filename or "model.onnx")
    load_model(path, with_data=False)
    ours = pbtxt.TritonConfig()
    ours.CopyFrom(config)
    if to is Target.onnxruntime:
        ours.backend = "ortgraph"
        for key in _ENUMS:  # numbers there, and of no account on a CPU
            pbtxt.set_parameter(ours, key, "")
    kinds = {group.Kind.Name(group.kind) for group in config.instance_group}
    is_on_cpu = to is Target.onnxruntime or kinds == {"KIND_CPU"}
    for note in check(ours, path, "CPU" if is_on_cpu else instance_kind()):
        if note.startswith("requests are never joined: "):
            said = "joined there all the same, although" if to is Target.onnxruntime else "no longer joined, since"
            conversion.changed.append(f"version {version.name}: requests are {said} it changes answers: {note[27:]}")


def _report(conversion: Conversion, kept: list[str], versions: list[int], new: Path, to: Target, as_json: bool) -> None:
    following = (
        f"ortgraph serve -m {new.parent}" if to is Target.ortgraph else f"tritonserver --model-repository {new.parent}"
    )
    if as_json:
        result: dict[str, Any] = {
            "directory": str(new),
            "to": to.value,
            "config": pbtxt.text(conversion.config),
            "versions": versions,
            "kept": kept,
            "changed": conversion.changed,
            "not_applicable": conversion.not_applicable,
            "next": following,
        }
        print(json.dumps(result))
        return
    console.print(f"{new} is a model directory of {to.value}, versions {', '.join(map(str, versions))}", markup=False)
    for title, lines in (
        ("kept", [", ".join(kept)] if kept else []),
        ("changed", conversion.changed),
        ("not applicable", conversion.not_applicable),
    ):
        for line in lines:
            console.print(f"  {title:<14}  {line}", markup=False)
    console.print(f"Next: {following}", markup=False)
