"""Write docker/requirements.txt: the packages of the image, out of requirements.lock, with their hashes.

usage: python docker/pin.py
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# ONNX Runtime, numpy, cuda-bindings and what they need; setuptools builds the package.
SERVING = (
    "cuda-bindings",
    "cuda-pathfinder",
    "flatbuffers",
    "numpy",
    "onnxruntime-gpu",
    "packaging",
    "protobuf",
    "setuptools",
)


def serving_pins(lock: str) -> str:
    """The lock's entries of the serving packages, as they stand there."""
    entries = re.split(r"\n(?=\S)", lock.strip())
    return "\n".join(entry for entry in entries if re.split(r"[=\s]", entry, maxsplit=1)[0] in SERVING) + "\n"


if __name__ == "__main__":
    lock = (ROOT / "requirements.lock").read_text()
    (ROOT / "docker" / "requirements.txt").write_text(serving_pins(lock))
