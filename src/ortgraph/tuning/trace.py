"""What ONNX Runtime's profiler says, put together by node and by operator.

The profiler writes events of category Session (loading, each run), Node (the host's time in a node's kernel) and, on a
provider that traces its device, Kernel (the device's time in a kernel or a copy, with the node that started it).
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]
_SUFFIX = "_kernel_time"


@dataclass(frozen=True)
class NodeTime:
    """A node, or an operator's nodes together; milliseconds a run. `device_ms` is None where it is not traced."""

    name: str
    operator: str
    provider: str
    nodes: int
    first_ms: float
    host_ms: float
    device_ms: float | None

    @property
    def ms(self) -> float:
        """The steady time: of the device where it is traced and has any, else of the host."""
        return self.device_ms or self.host_ms


@dataclass(frozen=True)
class Profile:
    """All of a trace; milliseconds. A steady figure is the median of the runs after the first.

    `outside_ms` is the part of a steady run in no node: inputs, outputs, scheduling. `copies` are those between host
    and device, by name: how many a run, and their time.
    """

    load_ms: float
    first_ms: float
    steady_ms: Sequence[float]
    outside_ms: float
    nodes: Sequence[NodeTime]
    operators: Sequence[NodeTime]
    copies: Mapping[str, tuple[float, float]]

    @property
    def median_ms(self) -> float:
        """Of the steady runs."""
        return statistics.median(self.steady_ms)


def summarise(events: Sequence[Event]) -> Profile:
    """Read a trace of at least two runs."""
    sessions = [event for event in events if event.get("cat") == "Session"]
    load_us = sum(e["dur"] for e in sessions if e["name"].startswith(("model_loading", "session_init")))
    runs = sorted((e["ts"], e["ts"] + e["dur"]) for e in sessions if e["name"] == "model_run")
    own = _self_times([event for event in events if _is_node(event)])
    kernels = [event for event in events if event.get("cat") == "Kernel"]
    host = _by_run(runs, ((_key(event), event["ts"], us) for event, us in own))
    device = _by_run(runs, ((_kernel_key(event), event["ts"], event["dur"]) for event in kernels))
    facts = {_key(event): (event["args"]["op_name"], event["args"].get("provider", "")) for event, _ in own}
    nodes = []
    for key, (operator, provider) in facts.items():
        times, traced = host[key], device.get(key)
        nodes.append(
            NodeTime(
                key,
                operator,
                provider.removesuffix("ExecutionProvider").lower(),
                1,
                times[0] / 1e3,
                statistics.median(times[1:]) / 1e3,
                statistics.median(traced[1:]) / 1e3 if traced else None,
            )
        )
    steady = [(end - start) / 1e3 for start, end in runs[1:]]
    in_nodes = [sum(times[i] for times in host.values()) / 1e3 for i in range(1, len(runs))]
    return Profile(
        load_ms=load_us / 1e3,
        first_ms=(runs[0][1] - runs[0][0]) / 1e3,
        steady_ms=steady,
        outside_ms=max(statistics.median(a - b for a, b in zip(steady, in_nodes, strict=True)), 0.0),
        nodes=sorted(nodes, key=lambda node: -node.ms),
        operators=sorted(_operators(nodes), key=lambda operator: -operator.ms),
        copies=_copies(runs, nodes, kernels),
    )


def _is_node(event: Event) -> bool:
    return event.get("cat") == "Node" and event["name"].endswith(_SUFFIX) and "op_name" in event.get("args", {})


def _key(event: Event) -> str:
    """The node's name, or operator and index where it has none."""
    name = str(event["name"]).removesuffix(_SUFFIX)
    return name or f"{event['args']['op_name']}#{event['args'].get('node_index', '')}"


def _kernel_key(event: Event) -> str:
    return str(event.get("args", {}).get("parent_name", "")).removesuffix(_SUFFIX)


def _self_times(events: Iterable[Event]) -> list[tuple[Event, float]]:
    """Each node's microseconds without those of the nodes that ran inside it (the body of an If, Loop or Scan)."""
    own: list[tuple[Event, float]] = []
    stacks: dict[Any, list[tuple[float, int]]] = defaultdict(list)
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        stack, end = stacks[event["tid"]], event["ts"] + event["dur"]
        while stack and stack[-1][0] < end:
            stack.pop()
        if stack:
            outer, us = own[stack[-1][1]]
            own[stack[-1][1]] = (outer, us - event["dur"])
        own.append((event, float(event["dur"])))
        if event["args"]["op_name"] in ("If", "Loop", "Scan"):
            stack.append((end, len(own) - 1))
    return own


def _by_run(runs: Sequence[tuple[float, float]], times: Iterable[tuple[str, float, float]]) -> dict[str, list[float]]:
    """The sum of microseconds in each run, by key."""
    found: dict[str, list[float]] = {}
    for key, start, us in times:
        for place, (begin, end) in enumerate(runs):
            if begin <= start <= end:
                found.setdefault(key, [0.0] * len(runs))[place] += us
                break
    return found


def _operators(nodes: Iterable[NodeTime]) -> list[NodeTime]:
    groups: dict[tuple[str, str], list[NodeTime]] = defaultdict(list)
    for node in nodes:
        groups[node.operator, node.provider].append(node)
    return [
        NodeTime(
            operator,
            operator,
            provider,
            len(members),
            sum(node.first_ms for node in members),
            sum(node.host_ms for node in members),
            sum(node.device_ms or 0.0 for node in members)
            if any(node.device_ms is not None for node in members)
            else None,
        )
        for (operator, provider), members in groups.items()
    ]


def _copies(
    runs: Sequence[tuple[float, float]], nodes: Iterable[NodeTime], kernels: Iterable[Event]
) -> dict[str, tuple[float, float]]:
    """Memcpy nodes that ONNX Runtime put in, and the device's own copies."""
    found = {node.name: (1.0, node.ms) for node in nodes if node.operator.startswith("Memcpy")}
    traced = [event for event in kernels if str(event["name"]).lower().startswith("memcpy")]
    for name, times in _by_run(runs, ((str(e["name"]), e["ts"], e["dur"]) for e in traced)).items():
        counts = _by_run(runs, ((name, e["ts"], 1.0) for e in traced if e["name"] == name))[name]
        found[name] = (statistics.median(counts[1:]), statistics.median(times[1:]) / 1e3)
    return found
