"""The WebGPU provider through the engine: the whole life of a bucket, answers against the CPU provider."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortgraph import ConfigError, Engine, ModelError
from ortgraph.batch import Request
from ortgraph.errors import CaptureError, RunError
from ortgraph.providers.webgpu import WebGpuProvider
from ortgraph.signature import Sizes
from tests.toys import refused
from tests.webgpu import gpu_toys as models
from tests.webgpu.gpu_toys import assert_equal, counter, eager_runs, image, load, load_encoder, text

BUCKETS = "batch=1,2; sequence=4,8"


@pytest.fixture(scope="module")
def encoder_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoder") / "model.onnx"
    onnx.save(models.encoder(), path)
    return path


@pytest.fixture(scope="module")
def convolution_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("convolution") / "model.onnx"
    onnx.save(models.convolution(), path)
    return path


@pytest.fixture(scope="module")
def encoder(encoder_path: Path) -> Iterator[Engine]:
    """Captured for four buckets; every replay is checked."""
    engine = load_encoder(encoder_path, buckets=BUCKETS, graph_capture="required", debug="1")
    yield engine
    engine.close()
    engine.close()


@pytest.fixture(scope="module")
def cpu(encoder_path: Path) -> Engine:
    return load_encoder(encoder_path, "cpu")


@pytest.fixture(scope="module")
def cpu_convolution(convolution_path: Path) -> Engine:
    return load(convolution_path, "cpu", {"max_batch_size": 2})


def saved(made: onnx.ModelProto, folder: Path) -> Path:
    onnx.save(made, folder / "model.onnx")
    return folder / "model.onnx"


def provider_of(engine: Engine) -> WebGpuProvider:
    assert isinstance(engine._provider, WebGpuProvider)
    return engine._provider


def shapes(engine: Engine, buckets: list[Sizes]) -> dict[Sizes, Any]:
    return {b: {s.name: engine.signature.shape(s, b) for s in engine.signature.inputs} for b in buckets}


def test_every_bucket_is_captured_before_ready(encoder: Engine) -> None:
    assert encoder.findings.notes == []
    assert encoder.provider_name == "webgpu"
    assert provider_of(encoder).remark == ""
    assert counter(encoder, "ortgraph_live_buckets") == 4
    assert counter(encoder, "ortgraph_captures_total") >= 4
    assert counter(encoder, "ortgraph_capture_seconds_count") == counter(encoder, "ortgraph_captures_total")


def test_a_size_that_the_config_fixes_is_a_bucket(convolution_path: Path, cpu_convolution: Engine) -> None:
    """As text_recognition's height: the ONNX model leaves it open, config.pbtxt does not."""
    written = {"max_batch_size": 2, "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [1, 4, 6]}]}
    engine = load(convolution_path, written=written, graph_capture="required")
    assert engine.findings.notes == []
    assert_equal(engine, cpu_convolution, [image(np.random.default_rng(0), 6, rows=2)])
    assert eager_runs(engine) == {}
    assert counter(engine, "ortgraph_bucket_hits_total", bucket="batch=2") == 1
    engine.close()


def test_ragged_batches_equal_the_cpu(encoder: Engine, cpu: Engine) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        lengths = rng.integers(1, 9, int(rng.integers(1, 5)))
        assert_equal(encoder, cpu, [text(rng, int(length), int(rng.integers(1, 3))) for length in lengths])
    assert eager_runs(encoder) == {}


def test_two_batches_of_one_bucket_in_flight_keep_their_own_answers(encoder: Engine, cpu: Engine) -> None:
    rng = np.random.default_rng(1)
    made = [[Request(text(rng, 4)), Request(text(rng, 4))] for _ in range(3)]
    flights = [encoder.begin(batch) for batch in made]
    for flight, batch in reversed(list(zip(flights, made, strict=True))):
        got, wanted = dict(encoder.finish(flight)), cpu.run_batch(batch)
        for index, answer in enumerate(wanted):
            np.testing.assert_allclose(got[index]["embedding"], answer["embedding"], atol=1e-4)


def test_nothing_is_captured_after_ready_unless_asked(encoder: Engine, cpu: Engine) -> None:
    before = counter(encoder, "ortgraph_captures_total")
    assert_equal(encoder, cpu, [text(np.random.default_rng(2), 11)])
    assert eager_runs(encoder).pop("no_bucket") == 1
    assert counter(encoder, "ortgraph_captures_total") == before


def test_a_second_generation_of_the_same_buckets_allocates_nothing(encoder_path: Path, cpu: Engine) -> None:
    engine = load_encoder(encoder_path, buckets=BUCKETS)
    buckets = [(1, 4), (1, 8), (2, 4), (2, 8)]
    tensors = 3 * len(buckets)
    assert counter(engine, "ortgraph_pool_misses_total") == tensors
    provider = provider_of(engine)
    provider.retire(buckets)
    assert counter(engine, "ortgraph_live_buckets") == 0
    assert provider.capture(shapes(engine, buckets)) == {}
    assert counter(engine, "ortgraph_pool_hits_total") == tensors
    assert counter(engine, "ortgraph_pool_misses_total") == tensors
    assert counter(engine, "ortgraph_live_buckets") == 4
    rng = np.random.default_rng(3)
    for length in (1, 4, 5, 8):
        assert_equal(engine, cpu, [text(rng, length), text(rng, length)])
    assert eager_runs(engine) == {}
    engine.close()


def test_without_a_pool_everything_is_allocated_again(encoder_path: Path) -> None:
    engine = load_encoder(encoder_path, buckets="batch=1; sequence=4", buffer_pool_generations="0")
    provider_of(engine).retire([(1, 4)])
    assert provider_of(engine).capture(shapes(engine, [(1, 4)])) == {}
    assert counter(engine, "ortgraph_pool_hits_total") == 0
    assert counter(engine, "ortgraph_pool_misses_total") == 6
    engine.close()


def test_a_bucket_retired_in_flight_still_answers(encoder_path: Path, cpu: Engine) -> None:
    """Its outputs are read before its tensors can go to the next bucket, which overwrites them here."""
    engine = load_encoder(encoder_path, buckets="batch=1; sequence=4")
    rng = np.random.default_rng(4)
    inputs = text(rng, 4)
    flight = engine.begin([Request(dict(inputs))])
    provider_of(engine).retire([(1, 4)])
    assert provider_of(engine).capture(shapes(engine, [(1, 4)])) == {}
    assert_equal(engine, cpu, [text(rng, 4)])
    np.testing.assert_allclose(dict(engine.finish(flight))[0]["embedding"], cpu.run(inputs)["embedding"], atol=1e-4)
    engine.close()


def test_exact_shapes_are_captured_as_they_are_seen(convolution_path: Path, cpu_convolution: Engine) -> None:
    """The mean over the width forbids padding it, so the width is exact; rows are padded to the batch buckets."""
    engine = load(convolution_path, written={"max_batch_size": 2}, captures_on_demand="2", debug="1")
    assert engine.findings.padded == [True, False]
    assert counter(engine, "ortgraph_captures_total") == 0
    rng = np.random.default_rng(5)
    for captures, width in ((1, 5), (2, 7), (2, 5), (3, 6), (3, 5), (4, 7)):  # 6 puts 7 out, since 5 was used last
        assert_equal(engine, cpu_convolution, [image(rng, width)])
        assert counter(engine, "ortgraph_captures_total") == captures, width
        assert counter(engine, "ortgraph_live_buckets") == min(captures, 2)
    assert eager_runs(engine) == {}
    for _ in range(12):
        widths = rng.integers(1, 9, int(rng.integers(1, 4)))
        assert_equal(engine, cpu_convolution, [image(rng, int(w), int(rng.integers(1, 3))) for w in widths])
    assert counter(engine, "ortgraph_live_buckets") == 2
    assert eager_runs(engine) == {}
    engine.close()


def test_exact_shapes_join_the_declared_buckets(encoder_path: Path, cpu: Engine) -> None:
    engine = load_encoder(encoder_path, rows=2, buckets="batch=1,2; sequence=4", captures_on_demand="1")
    rng = np.random.default_rng(6)
    for length in (3, 6, 7, 2):
        assert_equal(engine, cpu, [text(rng, length)])
    assert counter(engine, "ortgraph_captures_total") == 4
    assert counter(engine, "ortgraph_live_buckets") == 3
    assert counter(engine, "ortgraph_bucket_hits_total", bucket="batch=1,sequence=other") == 2
    assert eager_runs(engine) == {}
    engine.close()


def test_shape_arithmetic_is_folded_for_each_bucket(tmp_path: Path) -> None:
    path = saved(models.reshaped(), tmp_path)
    engine = load(path, buckets="batch=1,2; n=4,5", graph_capture="required", padding="off")
    cpu = load(path, "cpu")
    assert counter(engine, "ortgraph_captures_total") == 4
    assert provider_of(engine).remark == (
        "every captured bucket has a session of its own with a copy of the weights (now 4 x 0.0 MB beside the first), "
        "because the plugin leaves Slice to the CPU"
    )
    rng = np.random.default_rng(7)
    for rows, n in ((1, 4), (2, 5), (2, 4), (1, 5)):
        assert_equal(engine, cpu, [{"x": rng.standard_normal((rows, n, 3), np.float32)}])
    assert eager_runs(engine) == {}
    engine.close()


@pytest.mark.parametrize(
    ("made", "buckets", "inputs", "reason", "kind"),
    [
        (models.branching, "length=3", {"x": np.array([1, 2, 3], np.float32)}, "control flow nodes", ModelError),
        (
            models.determinant,
            "batch=1",
            {"x": np.eye(2, dtype=np.float32)[None]},
            "leaves Det to the CPU",
            CaptureError,
        ),
    ],
)
def test_a_model_that_cannot_be_captured(
    tmp_path: Path, made: Any, buckets: str, inputs: models.Inputs, reason: str, kind: type[Exception]
) -> None:
    path = saved(made(), tmp_path)
    engine = load(path, buckets=buckets)
    assert len(engine.findings.notes) == 1
    assert engine.findings.notes[0].startswith("1 of 1 buckets run eager: ")
    assert reason in engine.findings.notes[0]
    assert_equal(engine, load(path, "cpu"), [inputs])
    assert sum(eager_runs(engine).values()) == 1
    engine.close()
    with pytest.raises(kind, match=reason):
        load(path, buckets=buckets, graph_capture="required")


def test_an_output_that_is_only_copied_is_found_and_runs_eager(tmp_path: Path) -> None:
    """Plugin 0.4.0 does not record copies between buffers: a replay would leave such an output as it was."""
    path = saved(models.squeezed(), tmp_path)
    engine = load(path, buckets="batch=2; n=3", padding="off")
    (note,) = engine.findings.notes
    assert note.startswith("1 of 1 buckets run eager: output 'y' of a replay differs by ")
    assert counter(engine, "ortgraph_live_buckets") == 0
    assert_equal(engine, load(path, "cpu"), [{"x": np.arange(6, dtype=np.float32).reshape(2, 3)}])
    engine.close()


def test_a_shape_whose_replay_is_not_proven_is_tried_once(tmp_path: Path) -> None:
    path = saved(models.squeezed(), tmp_path)
    engine, cpu = load(path, captures_on_demand="2"), load(path, "cpu")
    for _ in range(3):
        assert_equal(engine, cpu, [{"x": np.random.default_rng(10).standard_normal((2, 3), np.float32)}])
    assert counter(engine, "ortgraph_captures_total") == 1
    assert counter(engine, "ortgraph_live_buckets") == 0
    assert eager_runs(engine) == {"not_captured": 3}
    engine.close()


def test_a_specialised_session_goes_with_its_bucket(tmp_path: Path) -> None:
    path = saved(models.reshaped(), tmp_path)
    engine, cpu = load(path, captures_on_demand="1"), load(path, "cpu")
    assert "(now 0 x 0.0 MB beside the first)" in provider_of(engine).remark
    rng = np.random.default_rng(11)
    for n in (4, 5, 4):
        assert_equal(engine, cpu, [{"x": rng.standard_normal((2, n, 3), np.float32)}])
        assert "(now 1 x 0.0 MB beside the first)" in provider_of(engine).remark
    assert eager_runs(engine) == {}
    engine.close()


def test_whole_numbers(tmp_path: Path) -> None:
    path = saved(models.counted(), tmp_path)
    engine = load(path, buckets="batch=2; n=3", graph_capture="required", webgpu__enableInt64="1", padding="off")
    ids = np.arange(6, dtype=np.int64).reshape(2, 3)
    np.testing.assert_array_equal(engine.run({"ids": ids})["y"], 3 * ids)
    assert eager_runs(engine) == {}
    engine.close()


def test_debug_mode_refuses_a_replay_that_would_use_other_tensors(encoder_path: Path) -> None:
    engine = load_encoder(encoder_path, buckets="batch=1; sequence=4", debug="1")
    (graph,) = provider_of(engine)._graphs.values()
    inputs = text(np.random.default_rng(8), 4)
    slot = provider_of(engine).slot((1, 4))
    for name, array in inputs.items():
        slot.borrow(name, provider_of(engine)._dtypes[name], array)
    graph.addresses["input 'input_ids'"] += 256
    with pytest.raises(RunError, match="debug: input 'input_ids' was captured at 0x"):
        slot.launch(["embedding"]).wait()
    graph.addresses["input 'input_ids'"] -= 256
    graph.binding._bound_outputs["embedding"] = None
    with pytest.raises(RunError, match="debug: 'embedding' is not bound to the tensor of its capture"):
        slot.launch(["embedding"]).wait()
    graph.binding._bound_outputs["embedding"] = graph.outputs["embedding"]
    slot.launch(["embedding"]).wait()
    engine.close()


def test_options_are_checked_by_name(encoder_path: Path) -> None:
    with refused(ConfigError, "unknown WebGPU option 'preferedLayout'; did you mean 'preferredLayout'?"):
        load(encoder_path, webgpu__preferedLayout="NCHW")
    with refused(
        ConfigError,
        "WebGPU option 'enableGraphCapture' is 0, but 'graph_capture' is auto; remove the option, "
        "'graph_capture' decides",
    ):
        load(encoder_path, webgpu__enableGraphCapture="0")
    with pytest.raises(ModelError, match="Invalid preferred layout: XX"):
        load(encoder_path, webgpu__preferredLayout="XX")


def test_capture_can_be_off(encoder_path: Path, cpu: Engine) -> None:
    engine = load_encoder(encoder_path, buckets=BUCKETS, graph_capture="off", webgpu__enableGraphCapture="0")
    assert_equal(engine, cpu, [text(np.random.default_rng(9), 4)])
    assert eager_runs(engine) == {"graph_capture_off": 1}
    assert counter(engine, "ortgraph_captures_total") == 0
    engine.close()


def test_time_that_goes_into_padding_is_counted(encoder_path: Path):
    """The time of the bucket that ran, against those between buckets at the longest and at the mean length sent."""
    engine = load_encoder(encoder_path, buckets=BUCKETS, graph_capture="required")
    engine.table = replace(engine.table, cost=lambda sizes: 1.0 + sizes[0] * sizes[1], _plans={}, _kinds={})
    seen = (0.0, 0.0, 0.0)
    for lengths, *grown in (([8], 9, 0, 0), ([6], 9, 2, 0), ([3], 5, 1, 0), ([7, 5], 17, 2, 2), ([9], 0, 0, 0)):
        engine.run_batch([Request(text(np.random.default_rng(length), length)) for length in lengths])
        before, seen = (
            seen,
            (
                counter(engine, "ortgraph_device_seconds_total"),
                counter(engine, "ortgraph_padding_seconds_total", cause="bucket"),
                counter(engine, "ortgraph_padding_seconds_total", cause="joining"),
            ),
        )
        assert [new - old for new, old in zip(seen, before, strict=True)] == pytest.approx(grown)
    engine.close()
