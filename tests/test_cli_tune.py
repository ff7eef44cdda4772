"""`ortgraph tune`, as a user runs it, and what it decides by."""

from __future__ import annotations

import itertools
import json
import math
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from tritonclient.grpc.model_config_pb2 import ModelConfig as TritonConfig

from ortgraph.buckets import BucketTable
from ortgraph.cli import pbtxt
from ortgraph.cli.target import read_target
from ortgraph.config import ModelConfig
from ortgraph.server import ROOT
from ortgraph.signature import Sizes
from ortgraph.tuning import inprocess
from ortgraph.tuning.axes import INSTANCES, Axis, Facts, server_axes, session_axes
from ortgraph.tuning.edit import edited
from ortgraph.tuning.inprocess import Engines
from ortgraph.tuning.load import Load, TuningError, parse_lengths, spread
from ortgraph.tuning.pairs import Pair, Settings, compare
from ortgraph.tuning.search import Budget, Search
from ortgraph.tuning.store import Store
from ortgraph.tuning.tables import ALLOWED_WASTE, best_ladders, candidate_lengths, plan
from ortgraph.tuning.weights import FormatTable, advise, fpa_settings
from tests import toys, tuned
from tests.tuned import CONFIG, FASTER, LOAD, measured, seed, tune


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    return tuned.write(tmp_path)


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned.hide_server(monkeypatch)
    monkeypatch.setattr(inprocess, "SLICE_S", 0.01)


def test_every_axis_of_the_cpu_is_measured_and_a_second_call_measures_nothing(encoder: Path, no_server: None):
    results = encoder.parent / "new" / "results.json"
    found = measured(encoder, *LOAD, "--budget-s", 300, "--results", results)
    axes = {entry["axis"] for entry in found["measurements"]}
    assert {"threads", "spinning"} <= axes <= {"threads", "spinning", "execution mode", "affinity", "confirm"}
    for entry in found["measurements"]:
        assert entry["rounds"] >= 3
        assert entry["largest_difference"] < 1e-4
        assert min(entry["base_ms"], entry["candidate_ms"], entry["noise"]) > 0
        assert entry["verdict"] in ("faster", "slower", "no better")
    assert found["unfinished"] == 0
    assert "response mode and instances: there is no Triton server; run 'ortgraph fetch'" in found["skipped"]
    assert (found["requests_a_batch"], found["load"]["clients"], found["provider"]) == (4, 4, "cpu")
    assert found["machine"]["versions"]["onnxruntime-gpu"]
    kept = results.read_bytes()

    again = measured(encoder, *LOAD, "--budget-s", 300, "--results", results)
    assert results.read_bytes() == kept
    assert again["reused_rounds"] == sum(entry["rounds"] for entry in found["measurements"])
    assert again["measurements"] == found["measurements"]
    assert (encoder / "config.pbtxt").read_text() == CONFIG

    other = measured(encoder, "--lengths", 4, "--clients", 1, "--budget-s", 1, "--results", results)
    assert (other["reused_rounds"], other["requests_a_batch"]) == (0, 1)
    assert len(json.loads(results.read_text())["sets"]) == 2


def test_a_winner_is_shown_as_a_change_and_written_when_it_is_accepted(encoder: Path, no_server: None):
    results = encoder.parent / "results.json"
    seed(encoder, results, rounds=[[2.0, 1.0, 1.0, 2.0]] * 7)
    line = 'parameters { key: "session.intra_op.allow_spinning" value: { string_value: "0" } }\n'
    code, out, _ = tune(encoder, *LOAD, "--budget-s", 30, "--results", results)
    assert code == 0
    assert "2.00 times as fast" in out
    assert f"+{line}" in out
    assert "config.pbtxt is as it was; --yes writes the change" in out
    assert (encoder / "config.pbtxt").read_text() == CONFIG

    found = measured(encoder, *LOAD, "--budget-s", 30, "--results", results, "--yes")
    assert (found["winner"], found["is_written"]) == (FASTER, True)
    assert (encoder / "config.pbtxt").read_text() == CONFIG + line
    assert sorted(path.name for path in encoder.iterdir()) == ["1", "config.pbtxt"]


def test_what_does_not_win_again_is_not_written(encoder: Path, no_server: None):
    results = encoder.parent / "results.json"
    seed(encoder, results, rounds=[[1.0, 1.01, 1.0, 1.0]] * 7)
    code, out, _ = tune(encoder, *LOAD, "--budget-s", 30, "--results", results, "--yes")
    assert code == 0
    assert "the config stays: session.intra_op.allow_spinning=0 was not faster when measured once more" in out
    assert (encoder / "config.pbtxt").read_text() == CONFIG


def test_ctrl_c_keeps_what_was_measured(encoder: Path):
    results = encoder.parent / "results.json"
    command = [sys.executable, "-m", "ortgraph", "tune", str(encoder), *LOAD, "--budget-s", "100", "--yes"]
    process = subprocess.Popen([*command, "--results", str(results)], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (results.is_file() and json.loads(results.read_text())["sets"][0]["pairs"]):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (
        said
        == f"error: stopped by Ctrl-C; what was measured is in {results}, and the same command goes on from there\n"
    )
    (mine,) = json.loads(results.read_text())["sets"]
    assert mine["pairs"][0]["rounds"]
    assert (encoder / "config.pbtxt").read_text() == CONFIG
    assert sorted(path.name for path in encoder.parent.iterdir()) == ["encoder", "results.json"]


def test_an_encoder_in_three_weight_formats(encoder: Path, no_server: None):
    model = onnx.load(encoder / "1" / "model.onnx")
    quantizer = MatMulNBitsQuantizer(model, block_size=32, is_symmetric=True)
    quantizer.process()
    int4 = encoder.parent / "int4.onnx"
    onnx.save(quantizer.model.model, int4)
    half = onnx.load(encoder / "1" / "model.onnx")
    half.graph.node[-1].output[0] = "single"
    half.graph.node.append(helper.make_node("Cast", ["single"], ["embedding"], to=toys.F16))
    half.graph.output[0].type.tensor_type.elem_type = toys.F16
    onnx.save(half, encoder.parent / "half.onnx")
    variants = ("--variant", f"fp32={encoder / '1' / 'model.onnx'}", "--variant", f"int4={int4}")
    variants = (*variants, "--variant", f"half={encoder.parent / 'half.onnx'}")
    found = measured(encoder, *LOAD, *variants, "--budget-s", 6, "--results", encoder.parent / "results.json")
    table = found["weight_formats"]
    assert [row["m"] for row in table["rows"]] == sorted(row["m"] for row in table["rows"])
    for row in table["rows"]:
        assert row["m"] == math.prod(row["sizes"])
        assert row["winner"] == min(row["us"], key=row["us"].get)
    assert sum(table["shares"]) == pytest.approx(1, abs=0.01)
    assert table["largest_difference"]["fp32"] == 0
    assert 0 < table["largest_difference"]["int4"] < 0.5
    assert 0 < table["largest_difference"]["half"] < 1e-3
    assert table["refused"] == {}
    assert table["best"] == min(table["mean_us"], key=table["mean_us"].get)
    assert table["mixed_us"] <= table["mean_us"][table["best"]] + 0.01


def test_the_benchmark_of_weight_formats(tmp_path: Path):
    output = tmp_path / "new" / "formats.json"
    command = [sys.executable, "-m", "benchmarks.weight_formats", "--layers", "2", "--width", "64", "--output"]
    done = subprocess.run([*command, str(output), "--m", "4", "--m", "1"], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    found = json.loads(output.read_text())
    assert [row["m"] for row in found["rows"]] == [1, 4]
    assert {row["winner"] for row in found["rows"]} <= {"fp32", "int4"}
    assert 0 < found["largest_difference"]["int4"] < 0.5
    assert found["refused"] == {}


def test_a_candidate_with_other_answers_is_out(tmp_path: Path):
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    for folder, made in ((right, toys.affine()), (wrong, toys.reduce("ReduceMax"))):
        folder.mkdir()
        toys.save(made, folder)
    engines = Engines(
        lambda chosen: ModelConfig("toy", "1", (wrong if chosen else right) / "model.onnx", padding="off"),
        [[{"x": np.array([[1, 2, 4]], "f")} for _ in range(2)]],
    )
    for candidate, refused in (({}, ""), ({"any": "1"}, "other answers: output 'y' differs by")):
        pair = Pair("answers", {}, candidate, "engine")
        is_over = iter((False, True)).__next__
        with engines.open({}, candidate) as (base, other):
            compare(pair, base, other, {"y": toys.FP32}, 0.0, is_over=is_over, after_round=lambda: None)
        assert pair.refused.startswith(refused)
        assert bool(pair.refused) == bool(refused)
        assert len(pair.rounds) == (0 if refused else 1)
        assert not pair.is_better
    engines.close()


def test_a_win_is_more_than_the_noise():
    def pair(rounds: Sequence[list[float]]) -> Pair:
        return Pair("", {}, {}, "engine", rounds=list(rounds), error=0.0)

    assert pair([[1.0, 0.9, 0.9, 1.0]] * 3).is_better
    assert not pair([[1.0, 0.9, 0.9, 1.0]] * 2).is_better
    assert not pair([[1.0, 0.99, 0.99, 1.0]] * 7).is_better
    assert not Pair("", {}, {}, "engine", rounds=[[1.0, 0.5, 0.5, 1.0]] * 7, refused="other answers").is_better
    # A median 4 % faster, but the rounds lie 20 % apart; the same median in quiet rounds.
    assert not pair([[1.0, r, r, 1.0] for r in (0.7, 0.85, 0.9, 0.96, 1.1, 1.2, 1.3)]).is_better
    assert pair([[1.0, r, r, 1.0] for r in (0.95, 0.955, 0.96, 0.96, 0.96, 0.965, 0.97)]).is_better
    assert not pair([[1.0, r, r, 1.0] for r in (0.7, 0.85, 0.9, 0.96, 1.1, 1.2, 1.3)]).is_done
    assert pair([[1.0, 1.0, 1.0, 1.0]] * 7).is_done
    assert pair([[1.0, 2.0, 2.0, 1.0]] * 3).is_done
    assert not pair([[1.0, 0.5, 0.5, 1.0]] * 3).is_done
    # A base that differs from itself by 30 % cannot tell 8 % apart.
    wild = [[1.0, 0.92 * (1 + drift) / 2, 0.92 * (1 + drift) / 2, drift] for drift in (0.7, 1.4, 0.6, 1.3, 1, 1.5, 0.8)]
    assert not pair(wild).is_better


def test_lengths(tmp_path: Path):
    file = tmp_path / "lengths.txt"
    file.write_text("8\n16 3\n\n8\n32,4\n")
    assert parse_lengths(str(file)) == {8: 2, 16: 3, 32: 4}
    assert parse_lengths("7") == {7: 1}
    assert parse_lengths("3..5") == {3: 1, 4: 1, 5: 1}
    file.write_text("8\nlong\n")
    for text, message in (
        ("5..3", "--lengths must go from a smaller to a larger size, got '5..3'"),
        (str(file), f"{file}, line 2, must be a length, or a length and a count, got 'long'"),
        ("0", "--lengths must be a size"),
    ):
        with pytest.raises(TuningError) as caught:
            parse_lengths(text)
        assert str(caught.value).startswith(message)


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(st.integers(1, 40), st.integers(1, 9), min_size=1, max_size=8),
    st.lists(st.integers(1, 60), min_size=40, max_size=40),
)
def test_no_other_sizes_cost_less(weights: dict[int, float], steps: list[int]):
    """Dynamic programming against all choices there are."""
    sizes = sorted({*weights, 41} if max(weights) % 2 else set(weights))
    cost = {size: float(sum(steps[:size])) for size in sizes}

    def price(ladder: Sequence[int]) -> float:
        return sum(weight * cost[next(s for s in ladder if s >= size)] for size, weight in weights.items())

    found = best_ladders(weights, cost)
    assert len(found) == len(sizes)
    for count, ladder in enumerate(found, 1):
        choices = (c for c in itertools.combinations(sizes, count) if c[-1] == sizes[-1])
        assert len(ladder) == count
        assert price(ladder) == min(map(price, choices))


def test_the_fewest_buckets_that_waste_next_to_nothing():
    """Times that only steps of 32 change: no bucket between them helps."""
    load = Load(8, 1, dict.fromkeys(range(8, 129), 1.0))
    lengths = candidate_lengths(load, 16)
    assert (len(lengths), lengths[-1]) == (16, 128)

    def cost(sizes: Sizes) -> float:
        rows, length = sizes
        return 1 + rows * math.ceil(length / 32)

    table = BucketTable(((1, 2, 4, 8), tuple(lengths)), (True, True), 0, 8, True, cost)

    def draw(rng: random.Random) -> list[Sizes]:
        return [(1, load.draw(rng)) for _ in range(8)]

    found = plan(table, draw, lengths, [1])
    assert found.ladders[1] == (32, 64, 96, 128)
    assert found.ladders[0] is not None
    assert {1, 8} <= set(found.ladders[0]) <= {1, 2, 4, 8}
    assert found.waste <= ALLOWED_WASTE
    assert spread(range(1, 101), 4) == [25, 50, 75, 100]


def test_a_mixed_choice_is_advised_only_where_it_pays():
    sizes: list[Sizes] = [(1, 1), (1, 64)]
    quiet = {"fp16": 0.0, "int4": 0.0}
    crossed = FormatTable(sizes, {"fp16": [2.0, 2.0], "int4": [1.0, 4.0]}, noise=quiet)
    assert [row["winner"] for row in crossed.rows()] == ["int4", "fp16"]
    found = advise(crossed, {(1, 1): 3, (1, 64): 1})
    assert (found["best"], found["mixed_us"], found["mixed_pays"]) == ("int4", 1.25e6, True)
    assert not advise(crossed, {(1, 1): 1, (1, 64): 0})["mixed_pays"]
    crossed.noise = {"fp16": 0.0, "int4": 0.4}
    assert not advise(crossed, {(1, 1): 3, (1, 64): 1})["mixed_pays"]


def test_fpa_intb_is_told_every_m():
    wanted = {"ep.cuda.fpa_intb_gemm": "1", "ep.cuda.fpa_intb_profile_m": "8,16,64"}
    assert fpa_settings([(1, 8), (2, 8), (1, 16), (4, 16)]) == wanted


def test_a_config_keeps_its_comments():
    changes = {"buckets": "batch=1; sequence=8", INSTANCES: "2", "cpu_streams": "2"}
    text = edited(CONFIG, changes)
    assert text.startswith("# An encoder; this comment stays.\n")
    read = TritonConfig()
    pbtxt.text_format.Parse(text, read)
    assert pbtxt.parameter(read, "buckets") == "batch=1; sequence=8"
    assert pbtxt.parameter(read, "cpu_streams") == "2"
    assert read.instance_group[0].count == 2
    assert len(read.parameters) == 3
    assert edited('backend: "ortgraph"', {INSTANCES: "2"}) == 'backend: "ortgraph"\ninstance_group [ { count: 2 } ]\n'


def test_candidates_fit_the_machine_and_the_config():
    def names(axes: Sequence[Any]) -> dict[str, list[dict[str, str]]]:
        return {axis.name: axis.candidates for axis in axes}

    cpu = names(session_axes(Facts("cpu", 4, 2, 8, False, True), {"intra_op_thread_count": "1"}))
    assert cpu["threads"][:2] == [{"intra_op_thread_count": "2"}, {"intra_op_thread_count": "4"}]
    assert {"cpu_streams": "2", "intra_op_thread_count": "2"} in cpu["threads"]
    assert not any(
        "cpu_streams" in c for a in session_axes(Facts("cpu", 4, 2, 1, False, True), {}) for c in a.candidates
    )
    own = names(session_axes(Facts("cpu", 2, 2, 1, False, True), {"intra_op_thread_count": "1"}))
    assert own["threads"] == [{"intra_op_thread_count": "2"}]
    assert names(session_axes(Facts("cpu", 2, 2, 1, False, True), {}))["threads"] == [{"intra_op_thread_count": "1"}]
    cuda = names(session_axes(Facts("cuda", 16, 8, 8, True, True), {}))
    assert set(cuda) == {"graph or eager", "cuDNN conv search", "NHWC", "cuDNN workspace", "TF32"}
    assert set(names(session_axes(Facts("cuda", 16, 8, 8, False, False), {}))) == {"graph or eager"}


def test_only_the_server_shows_instances_and_response_mode():
    (modes, instances) = server_axes(Facts("cuda", 16, 8, 8, False, False), is_asynchronous=True, instances=1)
    assert modes.candidates[0] == {"response_mode": "sender", "batches_in_flight": "2"}
    assert instances.candidates == [{INSTANCES: "2"}, {INSTANCES: "4"}]
    (instances,) = server_axes(Facts("cpu", 4, 4, 8, False, False), is_asynchronous=False, instances=2)
    shared = {INSTANCES: "4", "intra_op_thread_count": "1"}
    assert instances.candidates == [{INSTANCES: "1"}, {INSTANCES: "4"}, shared]
    assert server_axes(Facts("cpu", 4, 4, 1, False, False), is_asynchronous=False, instances=1) == []


def test_a_setting_that_the_config_does_not_know_is_skipped_and_one_that_fails_is_refused(encoder: Path):
    target = read_target(encoder)
    ids = np.ones((1, 4), np.int64)

    def configure(chosen: Settings) -> ModelConfig:
        written = pbtxt.read(encoder / "config.pbtxt")
        for key, value in chosen.items():
            pbtxt.set_parameter(written, key, value)
        return pbtxt.settings(written, target.model_path)

    engines = Engines(configure, [[{"input_ids": ids, "attention_mask": ids}]])
    store = Store(encoder.parent / "results.json", {})
    search = Search(store, {"embedding": toys.FP32}, 0.0, engines.open, None, lambda text: None)
    unknown, failing = {"use_no_such_option": "0"}, {"session.intra_op_thread_affinities": "none"}
    search.walk([Axis("options", [unknown, failing])], Budget.of(60), where="engine")
    engines.close()
    assert [line.split(";")[0] for line in search.skipped] == ["options: unknown parameter 'use_no_such_option'"]
    (pair,) = store.pairs
    assert (pair.candidate, pair.rounds, search.best) == (failing, [], {})
    assert "Processor id must consist of only digits" in pair.refused
    assert json.loads(store.path.read_text())["sets"][0]["pairs"][0]["refused"] == pair.refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "there is no file or folder nowhere"),
        (["ENCODER/1/model.onnx"], "ENCODER/1/model.onnx is a file; give the model's folder, with its config.pbtxt"),
        (["ENCODER", "--lengths", "long"], "--lengths must be a size (64), a range (8..128) or a file"),
        (["ENCODER", "--rows", "5"], "--rows 5 is more than max_batch_size 4"),
        (["ENCODER", "--variant", "int4"], "--variant must be label=model.onnx, each label once, got 'int4'"),
        (["ENCODER", "--variant", "int4=no.onnx"], "there is no file no.onnx"),
        (["ENCODER", "--variant", "int4=ENCODER/config.pbtxt"], "ENCODER/config.pbtxt is not an ONNX file"),
        (["ENCODER", "--results", "ENCODER/config.pbtxt"], "ENCODER/config.pbtxt is not a file of measurements"),
        (["ENCODER", "--results", "/proc/results.json"], ""),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, encoder: Path):
    code, out, err = tune(*(word.replace("ENCODER", str(encoder)) for word in arguments))
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {message}".replace("ENCODER", str(encoder)))
    assert err.count("\n") == 1
    assert (encoder / "config.pbtxt").read_text() == CONFIG


def test_a_config_that_cannot_be_served_is_one_line(encoder: Path):
    config = encoder / "config.pbtxt"
    for text, message in (
        ('backend: "ortgraph"\n', f"{config} lists no inputs; write them out, so that what is measured is served"),
        (CONFIG.replace("allow_ragged_batch", "ragged"), f"{config} is not a config.pbtxt: "),
        (CONFIG.replace("buckets", "bucket"), "unknown parameter 'bucket'; did you mean 'buckets'?"),
        (CONFIG.replace("dims: [ 32 ]", "dims: [ 33 ]"), "output 'embedding': dims are [33], the model has [32]"),
        (CONFIG.replace("ids=0..99", "ids=90..199"), "the model does not answer the load: "),
    ):
        config.write_text(text)
        code, out, err = tune(encoder, *LOAD)
        assert (code, out) == (1, "")
        assert err.startswith(f"error: {message}")
        assert err.count("\n") == 1
    shutil.rmtree(encoder / "1")
    code, _, err = tune(encoder)
    assert (code, err.count("\n")) == (1, 1)
    assert not list(Path().glob("*.tune.json"))


def test_usage_errors_and_help(encoder: Path):
    assert tune(encoder, "--clients", 0)[0] == 2
    assert "Example: ortgraph tune" in tune("--help")[1]
