"""`ortgraph tune` with the real server: what only shows there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ortgraph.cli import pbtxt
from ortgraph.cli.target import read_target
from ortgraph.engine import Engine
from ortgraph.tuning.load import Load, TuningError, batches
from ortgraph.tuning.served import served
from tests import tuned
from tests.server.repository import ONE_LINE


def test_two_configs_of_a_model_are_measured_side_by_side(tmp_path: Path):
    target = read_target(tuned.write(tmp_path))
    engine = Engine.load(target.settings)
    signature = engine.signature
    requests = batches(target.settings, signature, Load(4, 1, {8: 1, 16: 1}), per_batch=4, count=1)[0]
    wanted = [engine.run(inputs)["embedding"] for inputs in requests]
    engine.close()
    dtypes = {spec.name: spec.dtype for spec in signature.inputs + signature.outputs}
    texts = {"one": pbtxt.text(target.written)}
    target.written.instance_group[0].count = 2
    texts["two"] = pbtxt.text(target.written)
    with served(texts, target.model_path, requests, dtypes, 4) as subjects:
        for subject in subjects:
            assert 0 < subject.seconds(0) < 10
            for answer, right in zip(subject.answers(), wanted, strict=True):
                np.testing.assert_allclose(answer["embedding"], right, atol=1e-4)
        assert subjects[0].each == subjects[1].each >= 2


def test_a_model_that_does_not_load_is_a_sentence(tmp_path: Path):
    target = read_target(tuned.write(tmp_path))
    texts = {"base": ONE_LINE + 'parameters { key: "thread" }\n'}
    with (
        pytest.raises(TuningError, match=r"^the server does not load the model: .*unknown parameter 'thread'"),
        served(texts, target.model_path, [], {}, 1),
    ):
        pass


def test_what_wins_is_confirmed_by_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The kept measurements say that a setting wins; the server is asked, and its answer decides."""
    monkeypatch.setattr("ortgraph.tuning.served.SLICE_S", 0.05)
    encoder, results = tuned.write(tmp_path), tmp_path / "results.json"
    tuned.seed(encoder, results)
    found = tuned.measured(encoder, *tuned.LOAD, "--budget-s", 60, "--results", results)
    confirmed = found["confirmed"]
    assert (confirmed["base"], confirmed["measured_by"], confirmed["refused"]) == ({}, "server", "")
    assert tuned.FASTER.items() <= confirmed["candidate"].items()
    assert confirmed["rounds"] >= 3
    assert confirmed["largest_difference"] < 1e-4
    assert found["winner"] == (confirmed["candidate"] if confirmed["verdict"] == "faster" else {})
    assert not found["is_written"]
