"""What every command that reads a model or writes files stands on: clear errors, and never half a folder."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import onnx
import typer
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from ..errors import OrtgraphError
from .console import fail

ONE_FILE_BYTES = 1_900_000_000  # a protobuf file ends at 2 GB


class CommandError(OrtgraphError):
    """A command cannot do what was asked; the one line says what to change."""


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Turn what may go wrong in a command into one line and an exit code: 1, or 130 after Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        fail("stopped by Ctrl-C; nothing was written", code=130)
    except typer.Exit:
        raise
    except OrtgraphError as error:
        fail(str(error))
    except OSError as error:
        fail(_os_error(error))


def _os_error(error: OSError) -> str:
    where = f" {error.filename}" if error.filename else ""
    match error.errno:
        case errno.ENOSPC:
            return f"the disk is full{': ' + where.strip() if where else ''}; free some space, or write elsewhere"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return f"no permission to write or read{where}"
        case _:
            return str(error)


def load_model(path: Path, *, with_data: bool = True) -> onnx.ModelProto:
    """An ONNX file.

    Args:
        with_data: read the external data files too.

    Raises:
        CommandError: it is not there, not an ONNX file, or its external data is missing or outside its folder.
    """
    if not path.is_file():
        raise CommandError(f"there is no file {path}")
    try:
        model = onnx.load(str(path), format="protobuf", load_external_data=False)
    except (DecodeError, ValueError) as error:
        raise CommandError(f"{path} is not an ONNX file") from error
    if not model.HasField("graph") or not model.graph.output:
        raise CommandError(f"{path} is not an ONNX file: it holds no graph")
    names = external_files(model)
    outside = [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]
    if outside:
        raise CommandError(f"{path} names external data outside its folder: {outside[0]}; put it beside the model")
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise CommandError(f"{path} needs its external data file {missing[0]} beside it")
    if with_data:
        onnx.load_external_data_for_model(model, str(path.parent))
    return model


def external_files(model: onnx.ModelProto) -> list[str]:
    """The external data files that a model names, relative to its folder, each once."""
    tensors = onnx.external_data_helper._get_all_tensors(model)
    found = (
        entry.value
        for tensor in tensors
        if tensor.data_location == onnx.TensorProto.EXTERNAL
        for entry in tensor.external_data
        if entry.key == "location"
    )
    return list(dict.fromkeys(found))


@contextlib.contextmanager
def _parents(target: Path) -> Iterator[None]:
    """The folders above `target`, made if need be; those made are gone again when the block fails."""
    made = [folder for folder in target.parents if not folder.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for folder in made:
            with contextlib.suppress(OSError):  # not empty, or never made
                folder.rmdir()
        raise


@contextlib.contextmanager
def work_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target` for what is not whole yet, gone at the end.

    Its name is known before it is made: a Ctrl-C while `tempfile.TemporaryDirectory` makes one leaves it behind.
    """
    work = target.parent / f".{target.name}-{secrets.token_hex(4)}"
    try:
        work.mkdir()
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def new_folder(target: Path, *, force: bool) -> Iterator[Path]:
    """A folder to fill that becomes `target` in one step at the end, or is gone whatever else happens.

    Raises:
        CommandError: the target is there and `force` is not given.
    """
    if target.exists() and not force:
        raise CommandError(f"{target} is there already; --force replaces it")
    with _parents(target), work_folder(target) as work:
        folder = work / "new"
        folder.mkdir()
        yield folder
        if target.exists():
            target.rename(work / "old")
        folder.rename(target)


@contextlib.contextmanager
def new_file(target: Path, *, force: bool) -> Iterator[Path]:
    """A path to write to that becomes `target` in one step at the end, its external data beside it.

    External data must be written to a file in the same folder whose name starts with `target.name`.

    Raises:
        CommandError: the target is there and `force` is not given.
    """
    if target.exists() and not force:
        raise CommandError(f"{target} is there already; --force replaces it")
    with _parents(target), work_folder(target) as work:
        path = work / target.name
        yield path
        for written in sorted(work.iterdir(), key=lambda file: file == path):
            os.replace(written, target.parent / written.name)  # the model last: it is what others look for


@contextlib.contextmanager
def quiet_tools() -> Iterator[None]:
    """Import and call ONNX Runtime's tools in here: without their log, which one of them sets up when imported."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        root.handlers[:] = handlers
        root.setLevel(level)


def weight_bytes(model: onnx.ModelProto) -> int:
    """The size of a model's tensors in memory, near that of its file; 0 for external data that is not loaded."""
    return sum(len(t.raw_data) + 4 * len(t.float_data) for t in onnx.external_data_helper._get_all_tensors(model))


def save_model(model: onnx.ModelProto, path: Path) -> None:
    """Write a model whose data is loaded; one that is too large for a single file gets `NAME.onnx.data` beside it.

    The model's tensors are then empty.
    """
    is_large = weight_bytes(model) > ONE_FILE_BYTES
    onnx.save(model, str(path), save_as_external_data=is_large, location=f"{path.name}.data" if is_large else None)


def file_bytes(path: Path) -> int:
    """The size of an ONNX file with its external data."""
    names = external_files(onnx.load(str(path), load_external_data=False))
    return path.stat().st_size + sum((path.parent / name).stat().st_size for name in names)


def copy_model(source: Path, target: Path) -> None:
    """Copy an ONNX file and its external data to `target`, under the names that the file gives them."""
    model = load_model(source, with_data=False)
    shutil.copyfile(source, target)
    for name in external_files(model):
        copy = target.parent / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.parent / name, copy)
