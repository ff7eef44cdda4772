"""What ONNX Runtime's profiler says, put together by node and by operator.

The profiler writes events of category Session (loading, each run) and Node (the host's time in a node's kernel).
"""

from __future__ import annotations

import bisect
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]
_SUFFIX = "_kernel_time"


@dataclass(frozen=True)
class NodeTime:
    """A node, or an operator's nodes together; milliseconds a run.

    `device_ms` is the time with the device's part, where that is not the host's own: None on the CPU.
    """

    name: str
    operator: str
    provider: str
    nodes: int
    first_ms: float
    host_ms: float
    device_ms: float | None

    @property
    def ms(self) -> float:
        """The steady time, with the device's part."""
        return self.host_ms if self.device_ms is None else self.device_ms


@dataclass(frozen=True)
class Profile:
    """All of a trace; milliseconds. A steady figure is the median of the runs after the first.

    `outside_ms` is the part of a steady run in no node: inputs, outputs, scheduling, waiting for a device. `copies` are
    the nodes that copy between host and device, with their time.
    """

    load_ms: float
    first_ms: float
    steady_ms: Sequence[float]
    outside_ms: float
    nodes: Sequence[NodeTime]
    operators: Sequence[NodeTime]
    copies: Mapping[str, float]

    @property
    def median_ms(self) -> float:
        """Of the steady runs."""
        return statistics.median(self.steady_ms)


def summarise(events: Sequence[Event], waited: Sequence[Event] | None = None) -> Profile:
    """Read a trace of at least two runs.

    Args:
        waited: a trace of the same in which each launch waited for its kernel (see traced.py).
    """
    sessions = [event for event in events if event.get("cat") == "Session"]
    load_us = sum(e["dur"] for e in sessions if e["name"].startswith(("model_loading", "session_init")))
    runs = _runs(events)
    own = _self_times(events)
    host = _by_run(runs, own)
    device = _by_run(_runs(waited), _self_times(waited)) if waited is not None else {}
    facts = {_key(event): (event["args"]["op_name"], event["args"].get("provider", "")) for event, _ in own}
    nodes = []
    for key, (operator, provider) in facts.items():
        place = provider.removesuffix("ExecutionProvider").lower()
        steady_us = statistics.median(host[key][1:])
        device_us = statistics.median(device[key][1:]) if key in device and place != "cpu" else None
        device_ms = device_us / 1e3 if device_us is not None else None
        nodes.append(NodeTime(key, operator, place, 1, host[key][0] / 1e3, steady_us / 1e3, device_ms))
    steady = [(end - start) / 1e3 for start, end in runs[1:]]
    in_nodes = [sum(times[i] for times in host.values()) / 1e3 for i in range(1, len(runs))]
    return Profile(
        load_ms=load_us / 1e3,
        first_ms=(runs[0][1] - runs[0][0]) / 1e3,
        steady_ms=steady,
        outside_ms=max(statistics.median(a - b for a, b in zip(steady, in_nodes, strict=True)), 0.0),
        nodes=sorted(nodes, key=lambda node: -node.ms),
        operators=sorted(_operators(nodes), key=lambda operator: -operator.ms),
        copies={node.name: node.ms for node in nodes if node.operator.startswith("Memcpy")},
    )


def _runs(events: Sequence[Event]) -> list[tuple[float, float]]:
    """When each run began and ended, in microseconds."""
    found = [e for e in events if e.get("cat") == "Session" and e["name"] == "model_run"]
    return sorted((event["ts"], event["ts"] + event["dur"]) for event in found)


def _is_node(event: Event) -> bool:
    return event.get("cat") == "Node" and event["name"].endswith(_SUFFIX) and "op_name" in event.get("args", {})


def _key(event: Event) -> str:
    """The node's name, or operator and index where it has none."""
    name = str(event["name"]).removesuffix(_SUFFIX)
    return name or f"{event['args']['op_name']}#{event['args'].get('node_index', '')}"


def _self_times(events: Iterable[Event]) -> list[tuple[Event, float]]:
    """Each node's microseconds without those of the nodes that ran inside it (the body of an If, Loop or Scan)."""
    own: list[tuple[Event, float]] = []
    stacks: dict[Any, list[tuple[float, int]]] = defaultdict(list)
    for event in sorted(filter(_is_node, events), key=lambda e: (e["ts"], -e["dur"])):
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


def _by_run(runs: Sequence[tuple[float, float]], times: Iterable[tuple[Event, float]]) -> dict[str, list[float]]:
    """The sum of microseconds in each run, by node."""
    found: dict[str, list[float]] = {}
    begins = [begin for begin, _ in runs]
    for event, us in times:
        place = bisect.bisect_right(begins, event["ts"]) - 1
        if place >= 0 and event["ts"] <= runs[place][1]:
            found.setdefault(_key(event), [0.0] * len(runs))[place] += us
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
            sum(node.device_ms or 0.0 for node in members) if members[0].device_ms is not None else None,
        )
        for (operator, provider), members in groups.items()
    ]
