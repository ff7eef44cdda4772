"""What may be set, and what of it is worth trying on this machine, with this model and load."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from .pairs import Settings

INSTANCES = "instance_group.count"  # the one setting that is no entry of `parameters`


@dataclass(frozen=True)
class Axis:
    """Settings that exclude each other: the best of them is kept, then the next axis is tried on top of it."""

    name: str
    candidates: list[Settings] = field(default_factory=list)


@dataclass(frozen=True)
class Facts:
    """What decides which candidates make sense. `threads` is what ONNX Runtime takes by itself."""

    provider: str
    cores: int
    threads: int
    clients: int
    has_conv: bool
    is_float32: bool


def session_axes(facts: Facts, now: Mapping[str, str]) -> list[Axis]:
    """What can be measured in this process; `now` are the config's own parameters."""
    axes = _cpu_axes(facts, now) if facts.provider == "cpu" else _gpu_axes(facts)
    return [
        Axis(axis.name, kept)
        for axis in axes
        if (kept := [c for c in axis.candidates if any(now.get(key) != value for key, value in c.items())])
    ]


def _cpu_axes(facts: Facts, now: Mapping[str, str]) -> list[Axis]:
    current = int(now.get("intra_op_thread_count", "0")) or facts.threads
    counts = sorted({1, *(2**i for i in range(1, 9) if 2**i <= facts.cores), facts.cores} - {current})
    threads: list[Settings] = [{"intra_op_thread_count": str(count)} for count in counts]
    if facts.clients > 1:
        threads += [
            {"cpu_streams": str(streams), "intra_op_thread_count": str(max(1, facts.cores // streams))}
            for streams in (2, 4, 8)
            if streams <= facts.cores
        ]
    parallel: list[Settings] = []
    if facts.cores > 1:
        parallel.append({"execution_mode": "1", "inter_op_thread_count": "2"})
        if facts.cores > 2:
            parallel.append({"execution_mode": "1", "inter_op_thread_count": str(facts.cores // 2)})
    return [
        Axis("threads", threads),
        Axis("spinning", [{"session.intra_op.allow_spinning": "0"}]),
        Axis("execution mode", parallel),
    ]


def affinity_axis(threads: int) -> Axis:
    """A logical processor of its own for each thread that ONNX Runtime makes; the caller's own is the first.

    Processors are counted from 1, as ONNX Runtime does. It wants the number of threads to be given too.
    """
    processors = sorted(os.sched_getaffinity(0))
    if threads < 2 or threads > len(processors):
        return Axis("affinity")
    pinned = ";".join(str(processor + 1) for processor in processors[1:threads])
    candidate = {"intra_op_thread_count": str(threads), "session.intra_op_thread_affinities": pinned}
    return Axis("affinity", [candidate])


def _gpu_axes(facts: Facts) -> list[Axis]:
    axes = [Axis("graph or eager", [{"graph_capture": "off"}])]
    if facts.provider != "cuda":
        return axes
    if facts.has_conv:
        axes += [
            Axis("cuDNN conv search", [{"cudnn_conv_algo_search": name} for name in ("EXHAUSTIVE", "DEFAULT")]),
            Axis("NHWC", [{"prefer_nhwc": "1"}]),
            Axis("cuDNN workspace", [{"cudnn_conv_use_max_workspace": "0"}]),
        ]
    if facts.is_float32:
        axes.append(Axis("TF32", [{"use_tf32": "0"}]))
    return axes


def server_axes(facts: Facts, *, is_asynchronous: bool, instances: int) -> list[Axis]:
    """What only the real server shows."""
    axes = []
    if is_asynchronous:
        modes: list[Settings] = [{"response_mode": "sender", "batches_in_flight": count} for count in ("2", "3")]
        axes.append(Axis("response mode", modes))
    if facts.clients > 1:
        counts = [count for count in (1, 2, 4) if count != instances and count <= max(2, facts.cores)]
        several: list[Settings] = [{INSTANCES: str(count)} for count in counts]
        if facts.provider == "cpu":  # as they are, each instance takes every core
            threads = {count: str(max(1, facts.cores // count)) for count in counts if count > 1}
            several += [{INSTANCES: str(count), "intra_op_thread_count": threads[count]} for count in threads]
        axes.append(Axis("instances", several))
    return axes


def describe(settings: Mapping[str, str]) -> str:
    """A line for people."""
    return ", ".join(f"{key}={value}" for key, value in settings.items()) or "as it is"
