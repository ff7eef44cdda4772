"""What can be compared: model repositories, and the baselines that serve the same model.onnx."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import text_format  # type: ignore[import-untyped]
from tritonclient.grpc import model_config_pb2

from ortgraph.server import Installation

BASELINES = Path(__file__).resolve().parent / "baselines"
# Their answers are not the model's, so they cannot be checked.
UNCHECKED = frozenset({"noop"})


class BenchmarkError(Exception):
    """The benchmark cannot run; one line says what to change."""


@dataclass(frozen=True)
class Target:
    """One side of a comparison: a repository that holds only the model, under the name it has in the report."""

    label: str
    repository: Path
    is_checked: bool = True


def baseline_names() -> list[str]:
    """The files in baselines/ without their suffix."""
    return sorted(path.stem for path in BASELINES.glob("[a-z]*.py"))


def prepare(text: str, *, model: str, source: Path, folder: Path) -> Target:
    """Make a target's repository inside `folder`.

    Args:
        text: a baseline's name, `ortgraph` for the model as it is in `source`, or `[label=]path` of a repository.
        source: the model repository whose model.onnx and config the baselines use.

    Raises:
        BenchmarkError: there is no such baseline, repository or model.
    """
    label, equals, value = text.partition("=")
    if not equals:
        value, label = text, "ortgraph" if text == "ortgraph" else Path(text).name
    repository = folder / label
    if repository.exists():
        raise BenchmarkError(f"two targets are called '{label}'; name one as label=path")
    repository.mkdir(parents=True)
    if value in baseline_names():
        _write_baseline(value, _model_folder(source, model), repository / model)
    else:
        path = source if value == "ortgraph" else Path(value)
        if not path.is_dir():
            known = ", ".join(["ortgraph", *baseline_names()])
            raise BenchmarkError(f"a target must be one of {known}, or a model repository, got '{value}'")
        (repository / model).symlink_to(_model_folder(path, model).resolve())
    return Target(label, repository, is_checked=value not in UNCHECKED)


def with_backends(extra: Path, folder: Path) -> Path:
    """A backend directory inside `folder` with those of the server's installation and of `extra`, which win.

    Raises:
        BenchmarkError: there is none in `extra`.
    """
    own = {path.name: path for path in Installation.find().backends.iterdir() if path.is_dir()}
    further = {path.name: path for path in extra.iterdir() if path.is_dir()} if extra.is_dir() else {}
    if not further:
        raise BenchmarkError(
            f"--backends must be a folder that holds Triton backends, such as onnxruntime/, got {extra}"
        )
    target = folder / "backends"
    target.mkdir(parents=True)
    for name, path in {**own, **further}.items():
        (target / name).symlink_to(path.resolve(), target_is_directory=True)
    return target


def _model_folder(repository: Path, model: str) -> Path:
    folder = repository / model
    if not (folder / "config.pbtxt").is_file() or not (folder / "1").is_dir():
        raise BenchmarkError(f"{repository} must hold {model}/config.pbtxt and {model}/1, but does not")
    return folder


def _write_baseline(name: str, model_folder: Path, target: Path) -> None:
    """The same model.onnx, tensors and batching behind a baseline's model.py; no parameter of ours, nothing ragged."""
    onnx = model_folder / "1" / "model.onnx"
    if not onnx.is_file():
        raise BenchmarkError(f"{onnx} is not there; run `make models`")
    config = text_format.Parse((model_folder / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    if not config.input or not config.output:
        raise BenchmarkError(
            f"{model_folder}/config.pbtxt must list input and output, so that a baseline can serve them"
        )
    config.name, config.backend = target.name, "python"
    config.ClearField("parameters")
    config.ClearField("optimization")
    for tensor in config.input:
        tensor.allow_ragged_batch = False
    (target / "1").mkdir(parents=True)
    (target / "config.pbtxt").write_text(text_format.MessageToString(config))
    (target / "1" / "model.onnx").symlink_to(onnx.resolve())
    shutil.copyfile(BASELINES / f"{name}.py", target / "1" / "model.py")
