"""What `make demo` runs, as a whole, and that it notices a wrong answer."""

from __future__ import annotations

import subprocess
import sys

import pytest

from examples import demo
from ortgraph.server import ROOT, TritonServer


def test_the_demo_shows_everything_and_stops():
    command = [sys.executable, "-m", "examples.demo", "--duration-s", "1", "--users", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for shown in ("0.783", "Hello Triton 2026", "Invoice No. 4711, total 99.50", "p99 ms", "bucket hits"):
        assert shown in done.stdout
    assert "Traceback" not in done.stderr


def test_a_wrong_text_ends_the_demo(sample_server: TritonServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(demo.KNOWN_TEXTS, "hello.png", "Hello Triton 2027")
    with pytest.raises(demo.WrongAnswerError, match="must read 'Hello Triton 2027', got 'Hello Triton 2026'"):
        demo.show_texts(sample_server)


def test_a_wrong_similarity_ends_the_demo(sample_server: TritonServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(demo.KNOWN_SIMILARITIES, (0, 1), 0.5)
    with pytest.raises(demo.WrongAnswerError, match=r"must score 0\.5000"):
        demo.show_similarities(sample_server)
