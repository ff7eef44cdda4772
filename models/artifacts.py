"""The files a builder leaves behind: written whole or not at all, and known to be current without building again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

SOURCES = Path(__file__).parent


def write_atomically(path: Path, content: bytes) -> None:
    """Write a neighbour and rename it, so that a reader sees the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        scratch.write_bytes(content)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def build_key(*parts: str) -> str:
    """Changes whenever a builder's source changes, or one of `parts` (the package's hash)."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.glob("*.py")):
        digest.update(source.name.encode() + source.read_bytes())
    for part in parts:
        digest.update(part.encode())
    return digest.hexdigest()


def write_stamp(stamp: Path, key: str, files: Mapping[Path, bytes]) -> None:
    hashes = {str(path): hashlib.sha256(content).hexdigest() for path, content in files.items()}
    write_atomically(stamp, json.dumps({"key": key, "files": hashes}, indent=1).encode())


def is_current(stamp: Path, key: str) -> bool:
    """Whether the stamp was written for this key and every file it names still has the content it had then."""
    try:
        saved = json.loads(stamp.read_text(encoding="utf-8"))
        if saved["key"] != key:
            return False
        return all(hashlib.sha256(Path(path).read_bytes()).hexdigest() == old for path, old in saved["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
