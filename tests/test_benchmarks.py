"""Benchmarks without a server: what is compared, and how ratios are made."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from benchmarks import machine
from benchmarks.documents import table
from benchmarks.figures import covered_ns, merged
from benchmarks.loader import Measurement
from benchmarks.rounds import Load, Slice
from benchmarks.summary import summarise
from benchmarks.targets import BenchmarkError, prepare, with_backends
from loadtest.lengths import Lengths
from loadtest.percentiles import percentile

CONFIG = """
backend: "ortgraph"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] } ]
dynamic_batching { }
parameters { key: "buckets" value: { string_value: "batch=1,8" } }
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source" / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(CONFIG)
    (folder / "1" / "model.onnx").write_bytes(b"onnx")
    return folder.parent


def test_a_baseline_serves_the_same_model_without_our_settings(source: Path, tmp_path: Path):
    target = prepare("session_run", model="m", source=source, folder=tmp_path / "targets")
    folder = target.repository / "m"
    config = text_format.Parse((folder / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    assert (config.name, config.backend, config.max_batch_size) == ("m", "python", 8)
    assert not config.parameters
    assert [(tensor.name, tensor.allow_ragged_batch) for tensor in config.input] == [("x", False)]
    assert config.HasField("dynamic_batching")
    assert (folder / "1" / "model.onnx").read_bytes() == b"onnx"
    assert "session.run" in (folder / "1" / "model.py").read_text()
    assert target.is_checked
    assert not prepare("noop", model="m", source=source, folder=tmp_path / "targets").is_checked


def test_a_repository_is_compared_as_it_is(source: Path, tmp_path: Path):
    target = prepare(f"mine={source}", model="m", source=tmp_path / "other", folder=tmp_path / "targets")
    assert target.label == "mine"
    assert (target.repository / "m" / "config.pbtxt").read_text() == CONFIG


def test_a_further_backend_is_served_beside_the_installed_ones(tmp_path: Path):
    (tmp_path / "mine" / "onnxruntime").mkdir(parents=True)
    folder = with_backends(tmp_path / "mine", tmp_path / "work")
    assert (folder / "onnxruntime").resolve() == tmp_path / "mine" / "onnxruntime"
    assert (folder / "python" / "triton_python_backend_stub").is_file()
    (tmp_path / "empty").mkdir()
    with pytest.raises(BenchmarkError, match="must be a folder that holds Triton backends"):
        with_backends(tmp_path / "empty", tmp_path / "other")


@pytest.mark.parametrize(
    ("text", "message"), [("nothing", "got 'nothing'"), ("session_run", "two targets"), ("x=.", "must hold m/config")]
)
def test_a_target_that_cannot_be_served_is_refused(source: Path, tmp_path: Path, text: str, message: str):
    prepare("session_run", model="m", source=source, folder=tmp_path / "targets")
    with pytest.raises(BenchmarkError, match=message):
        prepare(text, model="m", source=source, folder=tmp_path / "targets")


def test_ratios_are_made_round_by_round():
    """The machine was twice as slow in round 1 for both: the ratio does not see it."""
    slices = []
    for number, factor in enumerate((1, 2)):
        for target, latency_ms in (("base", 10.0), ("ours", 5.0)):
            samples = [latency_ms * factor] * int(1000 / (latency_ms * factor))
            slices.append(Slice(target, "1:8", number, Measurement(samples, {}, 1.0, 1.0)))
    base, ours = summarise(slices)
    assert (base.target, ours.target) == ("base", "ours")
    assert (ours.throughput_ratio.low, ours.throughput_ratio.high) == (2.0, 2.0)
    assert (ours.p50_ratio.median, ours.p99_ratio.median) == (0.5, 0.5)
    assert ours.latency.count == 300
    assert ours.latency.p99_ms == 10.0


def test_loads_and_lengths_are_parsed_strictly():
    assert Load.parse("16:8..128") == Load(16, Lengths(8, 128))
    assert str(Load.parse("1:64")) == "1:64"
    assert Load.parse("14:zipf:8..128x4") == Load(14, Lengths(8, 128, 1.0), rows=4)
    for text in ("16", "0:8", "x:8", "1:", "1:8..4", "1:0", "1:8...9", "-1:8"):
        with pytest.raises(ValueError, match="must be"):
            Load.parse(text)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 99, 100, 101, 1000])
def test_a_percentile_is_a_sample_that_enough_others_do_not_exceed(count: int):
    samples = [float(i) for i in range(1, count + 1)]
    for percent in (1, 50, 90, 99, 99.9, 100):
        value = percentile(samples, percent)
        assert value in samples
        assert sum(sample <= value for sample in samples) * 100 >= percent * count - 1e-6
        assert sum(sample < value for sample in samples) * 100 < percent * count
    assert percentile([], 50) != percentile([], 50)


def test_a_results_command_does_not_name_its_file():
    found = machine.describe(["cpu", "--output", "/somewhere/x.json", "--rounds", "2", "--output=y.json"])
    assert found["command"] == "python -m benchmarks cpu --rounds 2"


def test_a_span_is_covered_by_the_union_of_what_ran():
    assert covered_ns([(0, 10), (5, 20), (30, 40), (32, 35), (90, 200)], 2, 100) == 18 + 10 + 10
    assert covered_ns([], 0, 10) == 0
    assert covered_ns([(0, 5), (20, 30)], 5, 20) == 0


def test_figures_of_one_machine_are_kept_together():
    def row(measure: str, measured: str, is_reached: bool | None) -> dict[str, object]:
        return {"measure": measure, "figure": "f", "asked": "1", "measured": measured, "is_reached": is_reached}

    hardware = {"cores": 2, "cpu": "c", "gpus": []}
    described = {"command": "c", "date": "d", "hardware": hardware, "versions": {"python": "3"}}
    first = merged({}, described, [row("python", "old", False), row("rows", "kept", True)])
    second = merged(first, described, [row("python", "new", None)])
    assert [each["measured"] for each in second["rows"]] == ["kept", "new"]
    assert "| f | 1 | kept | yes |" in table(second)
    assert "| f | 1 | new |  |" in table(second)
    other = merged(second, described | {"hardware": {**hardware, "cores": 3}}, [row("rows", "other", True)])
    assert [each["measured"] for each in other["rows"]] == ["other"]
