"""A small encoder in a model directory, and `ortgraph tune` on it, for the tests of both kinds."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import onnx
import pytest
from typer.testing import CliRunner

from models.encoder import TINY, build
from ortgraph.cli import app
from ortgraph.server import Installation, ServerError
from ortgraph.tuning.axes import Facts, affinity_axis, server_axes, session_axes

CONFIG = """# An encoder; this comment stays.
backend: "ortgraph"
max_batch_size: 4
input [
  { name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true },
  { name: "attention_mask" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true }
]
output [ { name: "embedding" data_type: TYPE_FP32 dims: [ 32 ] } ]
dynamic_batching { }
instance_group [ { count: 1 kind: KIND_CPU } ]
parameters { key: "buckets" value: { string_value: "batch=1,2,4; sequence=8,16" } }
parameters { key: "value_ranges" value: { string_value: "input_ids=0..99; attention_mask=0..1" } }
"""
LOAD = ("--lengths", "2..16", "--clients", "4")
FASTER = {"session.intra_op.allow_spinning": "0"}


def write(repository: Path) -> Path:
    """The model directory."""
    folder = repository / "encoder"
    (folder / "1").mkdir(parents=True)
    onnx.save(build(TINY, seed=3), folder / "1" / "model.onnx")
    (folder / "config.pbtxt").write_text(CONFIG)
    return folder


def hide_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a Triton server."""

    def find() -> Installation:
        raise ServerError("there is no Triton server; run 'ortgraph fetch'")

    monkeypatch.setattr(Installation, "find", staticmethod(find))


def tune(*arguments: object) -> tuple[int, str, str]:
    """The command in this process: exit code, standard output, standard error."""
    done = CliRunner().invoke(app, ["tune", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.exit_code, done.stdout, done.stderr


def measured(*arguments: object) -> dict[str, Any]:
    code, out, err = tune(*arguments, "--json")
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


def seed(encoder: Path, results: Path, **confirmed: Any) -> None:
    """A file of measurements in which `FASTER` wins by far, and what the confirmation says."""
    measured(encoder, *LOAD, "--budget-s", 1, "--results", results)
    kept = json.loads(results.read_text())
    (mine,) = kept["sets"]
    won = {"axis": "spinning", "base": {}, "candidate": FASTER, "where": "engine", "error": 0.0, "refused": ""}
    lost = [[1.0, 2.0, 2.0, 1.0]] * 7
    facts = Facts("cpu", len(os.sched_getaffinity(0)), -1, 4, False, True)
    slower = [
        {**won, "axis": axis.name, "candidate": {**base, **candidate}, "base": base, "rounds": lost}
        for axis in session_axes(facts, {})
        for candidate in axis.candidates
        for base in ({}, FASTER)
        if candidate != FASTER
    ]
    slower += [
        {**won, "axis": "affinity", "base": FASTER, "candidate": {**FASTER, **candidate}, "rounds": lost}
        for count in range(2, 65)
        for candidate in affinity_axis(count).candidates
    ]
    (instances,) = server_axes(facts, is_asynchronous=False, instances=1)
    slower += [
        {**won, "axis": "instances", "base": FASTER, "candidate": {**FASTER, **candidate}, "where": "server"}
        | {"rounds": lost}
        for candidate in instances.candidates
    ]
    mine["pairs"] = [{**won, "rounds": [[2.0, 1.0, 1.0, 2.0]] * 7}, *slower]
    if confirmed:
        mine["pairs"].append({**won, "axis": "confirm", **confirmed})
    results.write_text(json.dumps(kept))
