"""What a number depends on: command, hardware and versions."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ortgraph.tuning.store import gpus as gpus

PACKAGES = ("onnxruntime-gpu", "onnxruntime", "numpy", "tritonclient")


def describe(arguments: list[str]) -> dict[str, object]:
    """For a result's JSON; nothing in it names a person, a host or the file it is written to."""
    return {
        "command": shlex.join(["python", "-m", "benchmarks", *_without_output(arguments)]),
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": {
            "cpu": cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            "gpus": gpus(),
        },
        "versions": {"python": platform.python_version(), **installed()},
    }


def _without_output(arguments: list[str]) -> list[str]:
    kept = []
    words = iter(arguments)
    for word in words:
        if word == "--output":
            next(words, None)
        elif not word.startswith("--output="):
            kept.append(word)
    return kept


def cpu_model() -> str:
    """The processor's name as the kernel has it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def installed() -> Mapping[str, str]:
    """Versions of the packages that matter here."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def command_line() -> list[str]:
    """The arguments of this process."""
    return sys.argv[1:]
