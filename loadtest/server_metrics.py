"""Reads counters from Triton's metrics endpoint and says what they grew by."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Mapping

Labels = frozenset[tuple[str, str]]
Series = dict[tuple[str, Labels], float]

BUCKET_HITS = "ortgraph_bucket_hits_total"
# The serving package publishes its counts once a second.
PUBLISH_INTERVAL_S = 1.0
_LINE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {r"\n": "\n", r"\"": '"', r"\\": "\\"}


def parse(text: str) -> Series:
    """Every series of Prometheus' text format by name and labels; comments and what is no sample are skipped."""
    found: Series = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line.strip())
        if match is None:
            continue
        labels = frozenset(
            (name, re.sub(r'\\[n"\\]', lambda escape: _ESCAPES[escape[0]], value))
            for name, value in _LABEL.findall(match[2] or "")
        )
        try:
            found[match[1], labels] = float(match[3])
        except ValueError:
            continue
    return found


def read(url: str, timeout_s: float = 10.0) -> Series:
    """Fetch and parse. Raises OSError when the endpoint does not answer."""
    with urllib.request.urlopen(url, timeout=timeout_s) as response:
        return parse(response.read().decode())


def read_settled(url: str) -> Series:
    """Like `read`, after the counts of what has just ended were published."""
    time.sleep(PUBLISH_INTERVAL_S + 0.3)
    return read(url)


def grown(before: Series, after: Series, name: str, **where: str) -> float:
    """What all series of the counter `name` with the labels `where` grew by together."""
    return sum(
        value - before.get((series, labels), 0.0)
        for (series, labels), value in after.items()
        if series == name and where.items() <= dict(labels).items()
    )


def growth(before: Series, after: Series, name: str, label: str, **where: str) -> Mapping[str, float]:
    """By the value of `label`, what the counter `name` grew by; only series with the labels `where`, most first."""
    found: dict[str, float] = {}
    for (series, labels), value in after.items():
        known = dict(labels)
        if series == name and label in known and where.items() <= known.items():
            grown = value - before.get((series, labels), 0.0)
            if grown > 0:
                found[known[label]] = found.get(known[label], 0.0) + grown
    return dict(sorted(found.items(), key=lambda item: -item[1]))
