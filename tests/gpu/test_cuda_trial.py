"""The trial capture before a model's first one on a GPU: once for a model, and what it finds is not captured."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from ortgraph import Engine, child, parse
from tests.gpu.test_cuda_engine import TOLERANCE, config, model_path

__all__ = ["model_path"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ortgraph"


def test_a_passed_trial_is_made_once(cache: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = parse(config(model_path, "cuda"), model_path=model_path)
    for _ in range(2):
        engine = Engine.load(made)
        assert engine.notes == ()
        engine.close()
        (marker,) = cache.iterdir()
        assert str(model_path) in marker.read_text()
        monkeypatch.setattr(child, "python_command", lambda module: pytest.fail("a second trial"))


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os.kill(os.getpid(), 11)", "died of SIGSEGV (11)"),
        ('print(\'{"result": "lost", "reason": "CUDA failure 700"}\')', "lost the CUDA context: CUDA failure 700"),
    ],
)
def test_a_model_whose_trial_is_lost_runs_eager(
    cache: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, reason: str
) -> None:
    monkeypatch.setattr(child, "python_command", lambda module: [sys.executable, "-c", code])
    engine = Engine.load(parse(config(model_path, "cuda"), model_path=model_path))
    (note,) = engine.notes
    assert note.startswith("12 of 12 buckets run eager: a trial capture in a process of its own " + reason)
    cpu = Engine.load(parse(config(model_path, "cpu"), model_path=model_path))
    ids = np.random.default_rng(0).integers(0, 100, (2, 7))
    inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    np.testing.assert_allclose(engine.run(inputs)["embedding"], cpu.run(inputs)["embedding"], atol=TOLERANCE)
    assert engine.metrics.values()["ortgraph_eager_runs_total", (("reason", "trial_failed"),)] == 1
    engine.close()
    cpu.close()
