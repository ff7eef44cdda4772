"""The file that keeps every measurement: one JSON object, written whole after each round."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .load import TuningError
from .pairs import Pair, Settings

_PACKAGES = ("ortgraph", "onnxruntime-gpu", "onnxruntime", "onnxruntime-ep-webgpu", "numpy")
FORMAT = 1


def machine() -> dict[str, Any]:
    """What a time depends on beside the model: processor, cores, GPUs, versions."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {"cpu": _cpu(), "cores": len(os.sched_getaffinity(0)), "gpus": gpus(), "versions": versions}


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def gpus() -> list[str]:
    """Names and drivers of the NVIDIA GPUs; empty where there is none."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


class Store:
    """The measurements of one key (model, config, machine, versions, load); those of other keys stay in the file."""

    def __init__(self, path: Path, key: Mapping[str, Any]) -> None:
        """Read the file where there is one.

        Raises:
            TuningError: it is something else.
        """
        self.path = path
        self._sets: list[dict[str, Any]] = []
        if path.exists():
            try:
                found = json.loads(path.read_text(encoding="utf-8"))
                if found["format"] != FORMAT:
                    raise ValueError
                self._sets = list(found["sets"])
            except (ValueError, KeyError, TypeError, OSError) as error:
                raise TuningError(f"{path} is not a file of measurements; give another one with --results") from error
        mine = next((entry for entry in self._sets if entry["key"] == key), None)
        if mine is None:
            mine = {"key": dict(key), "pairs": [], "tables": {}}
            self._sets.append(mine)
        self._mine = mine
        self.pairs = [Pair(**entry) for entry in mine["pairs"]]
        self.tables: dict[str, Any] = mine["tables"]
        self.reused = sum(len(pair.rounds) for pair in self.pairs)

    def pair(self, axis: str, base: Settings, candidate: Settings, where: str) -> Pair:
        """The record of a comparison: the one that is there, else a new one."""
        for pair in self.pairs:
            if (pair.axis, pair.base, pair.candidate, pair.where) == (axis, base, candidate, where):
                return pair
        self.pairs.append(Pair(axis, dict(base), dict(candidate), where))
        return self.pairs[-1]

    def save(self) -> None:
        """Write a neighbour and rename it."""
        self._mine["pairs"] = [asdict(pair) for pair in self.pairs if pair.rounds or pair.refused]
        scratch = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            scratch.write_text(json.dumps({"format": FORMAT, "sets": self._sets}, indent=1) + "\n", encoding="utf-8")
            os.replace(scratch, self.path)
        finally:
            scratch.unlink(missing_ok=True)
