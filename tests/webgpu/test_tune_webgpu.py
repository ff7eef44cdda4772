"""`ortgraph tune` where graphs are captured: bucket tables and graph or eager."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from models.encoder import TINY, build
from tests import tuned


def test_a_bucket_table_for_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tuned.hide_server(monkeypatch)
    encoder = tuned.write(tmp_path)
    onnx.save(build(replace(TINY, fused=False, normalise=True), seed=3), encoder / "1" / "model.onnx")
    config = tuned.CONFIG.replace("batch=1,2,4; sequence=8,16", "batch=1; sequence=8")
    config += 'parameters { key: "execution_provider" value: { string_value: "webgpu" } }\n'
    (encoder / "config.pbtxt").write_text(config)
    load = ("--lengths", "4..5", "--clients", 1, "--budget-s", 4, "--results", tmp_path / "results.json")
    found = tuned.measured(encoder, *load)
    assert found["provider"] == "webgpu"
    buckets = found["buckets"]
    assert set(buckets["measured_ms"]) == {f"batch=1,sequence={s}" for s in (4, 5)}
    assert min(buckets["measured_ms"].values()) > 0
    dims = dict(part.split("=") for part in buckets["buckets"].split("; "))
    assert dims["batch"] == "1"
    assert dims["sequence"] in ("5,8", "4,5,8")  # the longest of the load, and what is there for longer requests
    assert buckets["waste"] <= 0.011
    table = found["graph_or_eager"]
    assert {label for row in table["rows"] for label in row["us"]} == {"graph", "eager"}
    assert table["refused"] == {}
    assert table["largest_difference"]["eager"] < 1e-3
