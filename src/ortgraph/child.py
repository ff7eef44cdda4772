"""Start a module's `main` in a Python of its own."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path


def python_command(module: str) -> list[str]:
    """A command for the Python of this process, which may be embedded in Triton's stub; empty where there is none.

    The module is imported under its own name, so that what it pickles can be read by others.
    """
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    places = [Path(prefix) / "bin" / name for prefix in (sys.prefix, sys.exec_prefix, sys.base_prefix)]
    found = next((str(place) for place in places if os.access(place, os.X_OK)), None) or shutil.which(name)
    return [found, "-c", f"from {module} import main; main()"] if found else []


def environment() -> Mapping[str, str]:
    """This process's, with its import path."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
