"""The load client and a whole comparison, against the real server."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
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
    command = [sys.executable, "-m", "benchmarks", "compare", "session_run", "io_binding", "noop"]
    command += ["--load", "2:8..16", "--rounds", "1", "--slice-s", "1", "--requests", "4", "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(output.read_text())
    assert [row["target"] for row in result["rows"]] == ["session_run", "io_binding", "noop"]
    assert all(row["failures"] == {} for row in result["rows"])
    assert all(row["latency"]["count"] > 0 for row in result["rows"])
    assert len(result["rounds"]) == 3
    assert result["hardware"]["cores"] > 0
    assert "session_run" in done.stdout
    assert "noop" in done.stdout


def test_ctrl_c_ends_a_comparison_with_what_was_measured(tmp_path: Path):
    """Ctrl-C in a terminal reaches the whole process group; the JSON is there after each round."""
    output = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks", "compare", "noop", "--load", "1:8", "--rounds", "100"]
    command += ["--slice-s", "0.3", "--warmup-s", "0", "--requests", "2", "--output", str(output)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        while not output.is_file() and process.poll() is None:
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    result = json.loads(output.read_text())
    finished = result["plan"]["finished_rounds"]
    assert 1 <= finished < 100
    assert len(result["rounds"]) == finished
    assert result["rows"][0]["latency"]["count"] > 0
    assert f"stopped by Ctrl-C after {finished} of 100 rounds" in said
    assert "req/s" in said


def test_figures_are_measured_on_a_tiny_model(tmp_path: Path):
    output = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks", "gpu-figures", "--tiny", "--seconds", "0.3", "--output", str(output)]
    only = [argument for name in ("device-io", "python", "busy") for argument in ("--only", name)]
    done = subprocess.run([*command, *only], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["figure"]: row["measured"] for row in json.loads(output.read_text())["rows"]}
    assert list(rows)[:2] == ["device busy, length 128, 1 instance", "device busy, length 128, 2 instances"]
    shares = [float(text) / 100 for text in re.findall(r"clients (\d+)%", "".join(rows.values()))]
    assert len(shares) == 8
    assert all(0 < share <= 1 for share in shares)
    assert re.match(r"[1-9]\d* us: reading \d+, begin \d+, ", rows["Python a request, batches of 1"])
    done = subprocess.run([*command, "--only", "nothing"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "'nothing'" in done.stdout
