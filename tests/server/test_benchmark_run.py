"""The load client and a whole comparison, against the real server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.loader import Job, run
from loadtest.lengths import Lengths
from loadtest.samples import build_pool
from loadtest.wire import Shot, encode
from ortgraph.server import ROOT, TritonServer

MODEL = "text_embedding"


@pytest.fixture(scope="module")
def pool() -> list[Shot]:
    samples = build_pool(ROOT / "model_repository" / MODEL, Lengths(8, 24), count=8)
    return [Shot(encode(MODEL, s.inputs, list(s.expected)), s.expected) for s in samples]


def job(server: TritonServer, **options: object) -> Job:
    host, port = server.http_url.split(":")
    values = {"load": "4:8..24", "clients": 4, "warmup_s": 0.0, "duration_s": 1.0, "seed": 1} | options
    return Job(host=host, port=int(port), **values)  # type: ignore[arg-type]


def test_right_answers_are_counted(sample_server: TritonServer, pool: list[Shot]):
    measured = run(job(sample_server), pool)
    assert measured.failures == {}
    assert len(measured.latencies_ms) > 0
    assert all(latency_ms > 0 for latency_ms in measured.latencies_ms)


def test_a_wrong_answer_and_a_refusal_are_failures(sample_server: TritonServer, pool: list[Shot]):
    off = [
        Shot(shot.request, {name: array + np.float32(0.5) for name, array in shot.expected.items()}) for shot in pool
    ]
    measured = run(job(sample_server), off)
    assert measured.latencies_ms == []
    assert all(failure.startswith("wrong answer: output 'embedding' is off by") for failure in measured.failures)
    refused = [Shot(shot.request.replace(b"embedding", b"embeddinx"), shot.expected) for shot in pool]
    measured = run(job(sample_server), refused)
    assert measured.latencies_ms == []
    assert measured.failures
    assert all(failure.startswith("HTTP 4") for failure in measured.failures)


def test_a_comparison_writes_what_it_measured(tmp_path: Path):
    output = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks", "compare", "session_run", "noop", "--load", "2:8..16"]
    command += ["--rounds", "1", "--slice-s", "1", "--requests", "4", "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(output.read_text())
    assert [(row["target"], row["failures"]) for row in result["rows"]] == [("session_run", {}), ("noop", {})]
    assert all(row["latency"]["count"] > 0 for row in result["rows"])
    assert len(result["rounds"]) == 2
    assert result["hardware"]["cores"] > 0
    assert "session_run" in done.stdout
    assert "noop" in done.stdout
