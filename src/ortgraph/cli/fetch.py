"""`ortgraph fetch`: unpack the Triton server of the nvidia-pytriton wheel into .triton, as files."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Annotated

import typer

from ..errors import OrtgraphError
from ..server import ROOT
from .console import console, fail

PACKAGE = "nvidia-pytriton==0.7.0"
WHEEL_SHA256 = "21f063ff93bb426d0c06b7a55e7eb9efcfe62c0dddd9a908e9877e18710128df"
_SERVER, _LIBRARIES = "pytriton/tritonserver/", "nvidia_pytriton.libs/"
_STUB = "triton_python_backend_stub"


class FetchError(OrtgraphError):
    """The server could not be fetched."""


def fetch(
    force: Annotated[bool, typer.Option("--force", help="Unpack anew even if it is there.")] = False,
    folder: Annotated[Path, typer.Option(help="Where to unpack.")] = ROOT / ".triton",
) -> None:
    """Fetch the Triton server (release 24.10, 55 MB). Example: ortgraph fetch"""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stamp = folder / "fetched.txt"
    wanted = f"{PACKAGE} for Python {version}\n"
    if not force and stamp.is_file() and stamp.read_text() == wanted:
        _link_backend(folder)
        return
    try:
        console.print(f"Fetching {PACKAGE} (55 MB)")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with console.status("Downloading"), tempfile.TemporaryDirectory(dir=folder.parent, prefix=".triton-") as work:
            wheel = _download(Path(work))
            unpacked = Path(work) / "triton"
            _unpack(wheel, unpacked, version)
            (unpacked / "fetched.txt").write_text(wanted)
            if folder.exists():
                folder.rename(Path(work) / "old")  # never half a folder, however this ends
            unpacked.rename(folder)
            _link_backend(folder)
    except (FetchError, OSError, zipfile.BadZipFile) as error:
        fail(str(error))
    console.print(f"Triton server 2.51.0 is in {folder}")


def _download(work: Path) -> Path:
    """pip fetches, so that the user's index, proxy and certificates apply. It takes a hash only from a file."""
    requirement = work / "requirements.txt"
    requirement.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n", encoding="ascii")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--require-hashes", "--dest", str(work), "--requirement", str(requirement)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line]
        reason = lines[-1].removeprefix("ERROR: ").strip() if lines else "no wheel for this machine"
        raise FetchError(f"cannot download {PACKAGE}: {reason}; check the network and pip's index")
    return wheels[0]


def _unpack(wheel: Path, folder: Path, version: str) -> None:
    """bin/tritonserver, lib/ (its libraries), backends/python (with the stub of this Python)."""
    with zipfile.ZipFile(wheel) as archive:
        stub = f"{_SERVER}python_backend_stubs/{version}/{_STUB}"
        if stub not in archive.namelist():
            raise FetchError(f"{PACKAGE} has no Python backend stub for Python {version}; use 3.11, 3.12 or 3.13")
        for name in archive.namelist():
            if name == f"{_SERVER}bin/tritonserver":
                target = folder / "bin" / "tritonserver"
            elif name.startswith(_LIBRARIES) and ("libpython3" not in name or f"{version[1:]}.so" in name):
                target = folder / "lib" / name.removeprefix(_LIBRARIES)
            elif name.startswith(f"{_SERVER}backends/python/"):
                target = folder / "backends" / "python" / name.removeprefix(f"{_SERVER}backends/python/")
            elif name == stub:
                target = folder / "backends" / "python" / _STUB
            else:
                continue
            if name.endswith("/"):
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(name) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink)
    for program in (folder / "bin" / "tritonserver", folder / "backends" / "python" / _STUB):
        program.chmod(program.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)


def _link_backend(folder: Path) -> None:
    """Our Python-based backend beside Triton's Python backend."""
    link, target = folder / "backends" / "ortgraph", ROOT / "backends" / "ortgraph"
    if link.is_symlink() and not link.exists():
        link.unlink()  # the project was moved
    if not link.exists():
        link.symlink_to(target, target_is_directory=True)
