"""The real server on small models: every type and shape, batches of strangers, errors, metrics, cancelling."""

from __future__ import annotations

import queue
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from ortgraph.server import TritonServer
from tests.server.repository import TYPES, graph, write
from tests.server.wire import (
    PROTOCOLS,
    Answer,
    infer,
    infer_together,
    metrics,
    stub_pids,
    stubs,
    to_wire,
    total,
    wait_until,
)
from tests.server.zoo import DOUBLED, SLOW_STEPS, TABLE

both_protocols = pytest.mark.parametrize("protocol", PROTOCOLS)
FLOATS = {"FP16": np.float16, "FP32": np.float32, "FP64": np.float64, "BF16": ml_dtypes.bfloat16}


def values(name: str, shape: tuple[int, ...], seed: int = 1) -> np.ndarray[Any, Any]:
    """Values that use the whole range of a type."""
    random = np.random.default_rng(seed)
    if name in FLOATS:
        return (random.standard_normal(shape) * 1e4).astype(FLOATS[name])
    dtype = np.dtype(triton_to_np_dtype(name))
    if name == "BOOL":
        return random.integers(0, 2, shape).astype(bool)
    limits = np.iinfo(dtype)
    return random.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)


def every_type(shape: tuple[int, ...], seed: int = 1) -> dict[str, np.ndarray[Any, Any]]:
    return {f"in_{name}": values(name, shape, seed) for name in TYPES}


def assert_echoed(answer: Answer, inputs: dict[str, np.ndarray[Any, Any]]) -> None:
    assert answer.keys() == {name.replace("in_", "out_") for name in inputs}
    for name, sent in inputs.items():
        got = answer[name.replace("in_", "out_")]
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape), name
        assert got.tobytes() == sent.tobytes(), name


def model_config(server: TritonServer, model: str) -> dict[str, Any]:
    with http_client.InferenceServerClient(server.http_url) as client:
        config: dict[str, Any] = client.get_model_config(model)
        return config


# How a model gets its config


@pytest.mark.parametrize("model", ["types", "types_python"])
def test_a_config_of_one_line_is_completed_from_the_model(zoo_server: TritonServer, model: str) -> None:
    config = model_config(zoo_server, model)
    assert config["max_batch_size"] == 32
    assert "dynamic_batching" in config
    assert [tensor["name"] for tensor in config["input"]] == [f"in_{name}" for name in TYPES]
    assert [tensor["data_type"] for tensor in config["output"]] == [f"TYPE_{name}" for name in TYPES]
    assert all(tensor["dims"] == [-1] for tensor in config["input"] + config["output"])
    assert config["backend"] == ("python" if model == "types_python" else "ortgraph")


def test_a_written_max_batch_size_is_kept(zoo_server: TritonServer) -> None:
    config = model_config(zoo_server, "types_of_four")
    assert config["max_batch_size"] == 4
    assert len(config["input"]) == len(TYPES)
    with pytest.raises(InferenceServerException, match="batch-size must be <= 4"):
        infer(zoo_server, "http", "types_of_four", every_type((5, 1)))
    assert_echoed(infer(zoo_server, "http", "types_of_four", every_type((4, 1))), every_type((4, 1)))


def test_a_model_whose_first_axis_is_no_batch_is_not_batched(zoo_server: TritonServer) -> None:
    for model, dims in (("types_unbatched", [-1, -1]), ("scalars", [1])):
        config = model_config(zoo_server, model)
        assert config["max_batch_size"] == 0
        assert "dynamic_batching" not in config
        assert config["input"][0]["dims"] == dims


def test_rows_of_one_number_are_served_without_batching(zoo_server: TritonServer) -> None:
    """With a max_batch_size they would need `reshape`, which a config cannot be completed with."""
    assert model_config(zoo_server, "numbers")["max_batch_size"] == 0
    x = np.arange(3, dtype=np.float32)
    np.testing.assert_array_equal(infer(zoo_server, "http", "numbers", {"x": x})["y"], 2 * x)


# Types and shapes


@both_protocols
@pytest.mark.parametrize("model", ["types", "types_python", "types_unbatched"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 5), (1, 0), (3, 257)])
def test_every_type_comes_back_bit_for_bit(
    zoo_server: TritonServer, protocol: str, model: str, shape: tuple[int, ...]
) -> None:
    inputs = every_type(shape)
    assert_echoed(infer(zoo_server, protocol, model, inputs), inputs)


@both_protocols
def test_special_floats_are_data(zoo_server: TritonServer, protocol: str) -> None:
    special = [np.nan, np.inf, -np.inf, -0.0, 0.0]
    inputs = every_type((1, 5)) | {f"in_{name}": np.array([special]).astype(dtype) for name, dtype in FLOATS.items()}
    assert_echoed(infer(zoo_server, protocol, "types", inputs), inputs)


@both_protocols
@pytest.mark.parametrize("shape", [(0, 5), (4, 0), (0, 0)])
def test_server_4865_empty_tensors_of_an_unbatched_model(
    zoo_server: TritonServer, protocol: str, shape: tuple[int, ...]
) -> None:
    inputs = every_type(shape)
    assert_echoed(infer(zoo_server, protocol, "types_unbatched", inputs), inputs)


@both_protocols
def test_a_batch_of_no_rows_is_refused_by_triton(zoo_server: TritonServer, protocol: str) -> None:
    """Triton itself counts a batch of 0 rows as 1 and then misses its bytes: such a request never reaches a model."""
    with pytest.raises(InferenceServerException, match="input byte size mismatch") as caught:
        infer(zoo_server, protocol, "types", every_type((0, 5)))
    assert caught.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")


@both_protocols
def test_strings_come_back_byte_for_byte(zoo_server: TritonServer, protocol: str) -> None:
    texts = [[b"plain", "bé ∑ 語".encode(), b""], [b"a\x00b", b"x" * 70_000, b"\n"]]
    sent = np.array(texts, np.object_)
    answer = infer(zoo_server, protocol, "strings", {"in_BYTES": sent})
    assert answer["out_BYTES"].tolist() == texts


@both_protocols
def test_a_string_that_is_not_utf8_is_refused(zoo_server: TritonServer, protocol: str) -> None:
    sent = np.array([[b"\xff\xfe"]], np.object_)
    with pytest.raises(InferenceServerException, match="'in_BYTES': ONNX Runtime takes UTF-8 strings only") as caught:
        infer(zoo_server, protocol, "strings", {"in_BYTES": sent})
    assert caught.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")


@both_protocols
def test_scalars_travel_as_one_element(zoo_server: TritonServer, protocol: str) -> None:
    inputs = {"x": np.array([1.5], np.float32), "k": np.array([3, -4])}
    answer = infer(zoo_server, protocol, "scalars", inputs)
    assert (answer["y"].tolist(), answer["m"].tolist()) == ([3.0], [6, -8])


@both_protocols
@pytest.mark.parametrize(("rows", "streams"), [(1, 1), (3, 2), (2, 3), (5, 7)])
def test_the_batch_may_be_any_axis_when_triton_does_not_batch(
    zoo_server: TritonServer, protocol: str, rows: int, streams: int
) -> None:
    """`x[0]` and `state[1]` have buckets of their own, addressed by input and axis."""
    x, state = values("FP32", (rows, 6)), values("FP32", (2, streams, 4))
    answer = infer(zoo_server, protocol, "states", {"x": x, "state": state})
    np.testing.assert_array_equal(answer["y"], x + x)
    np.testing.assert_array_equal(answer["next"], -state)


def test_a_dimension_addressed_by_axis_names_its_bucket(zoo_server: TritonServer) -> None:
    infer(zoo_server, "http", "states", {"x": values("FP32", (9, 1)), "state": values("FP32", (2, 3, 4))})
    hits = {"model": "states", "version": "1", "bucket": "x[0]=16,state[1]=4"}
    wait_until(lambda: total(metrics(zoo_server), "ortgraph_bucket_hits_total", **hits) == 1, "the hit was published")


# Optional inputs, requested outputs


@both_protocols
@pytest.mark.parametrize("has_scale", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_server_4150_optional_inputs_take_their_defaults(
    zoo_server: TritonServer, protocol: str, has_scale: bool, has_bias: bool
) -> None:
    x, scale, bias = values("FP32", (2, 3), 1), values("FP32", (2, 3), 2), values("FP32", (2, 1), 3)
    inputs = {"x": x} | ({"scale": scale} if has_scale else {}) | ({"bias": bias} if has_bias else {})
    wanted = x * (scale if has_scale else np.float32(3)) + (bias if has_bias else np.float32(0.5))
    np.testing.assert_array_equal(infer(zoo_server, protocol, "optional", inputs)["y"], wanted)


@both_protocols
def test_only_the_outputs_asked_for_come_back(zoo_server: TritonServer, protocol: str) -> None:
    inputs = {"x": np.ones((2, 3), np.float32), "mask": np.ones((2, 3), np.float32)}
    assert infer(zoo_server, protocol, "masked", inputs, ["weighted"]).keys() == {"weighted"}
    assert infer(zoo_server, protocol, "masked", inputs, ["mean"]).keys() == {"mean"}
    assert infer(zoo_server, protocol, "masked", inputs).keys() == {"mean", "weighted"}


# Batches of strangers: `together` holds requests until 8 rows have come, so these meet in one batch


def masked_request(rows: int, length: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Small whole numbers, so that sums are exact in float32 in any order."""
    random = np.random.default_rng(seed)
    mask = random.integers(0, 2, (rows, length)).astype(np.float32)
    mask[:, 0] = 1
    return {"x": random.integers(-9, 10, (rows, length)).astype(np.float32), "mask": mask}


def assert_masked(answer: Answer, inputs: dict[str, np.ndarray[Any, Any]]) -> None:
    weighted = inputs["x"] * inputs["mask"]
    np.testing.assert_array_equal(answer["weighted"], weighted)
    np.testing.assert_array_equal(answer["mean"], weighted.sum(1) / inputs["mask"].sum(1))


def assert_one_execution(server: TritonServer, model: str, before: dict[str, float], requests: int) -> None:
    """Triton called `execute` once for all these requests."""
    after = metrics(server)
    for name, grown in (
        ("nv_inference_exec_count", 1),
        ("nv_inference_request_success", requests),
        ("nv_inference_request_failure", 0),
    ):
        assert total(after, name, model=model) - total(before, name, model=model) == grown, name


@both_protocols
def test_server_8094_requests_of_different_lengths_run_together(zoo_server: TritonServer, protocol: str) -> None:
    before = metrics(zoo_server)
    sent = [masked_request(1, length, length) for length in (1, 2, 3, 5, 8, 13, 21, 34)]
    answers = infer_together([partial(infer, zoo_server, protocol, "together", inputs) for inputs in sent])
    for answer, inputs in zip(answers, sent, strict=True):
        assert_masked(answer, inputs)
    assert_one_execution(zoo_server, "together", before, 8)


def test_server_3984_rows_of_strangers_are_joined_and_split(zoo_server: TritonServer) -> None:
    before = metrics(zoo_server)
    sent = [masked_request(rows, length, rows) for rows, length in ((2, 4), (1, 9), (4, 4), (1, 2))]
    calls = [partial(infer, zoo_server, PROTOCOLS[i % 2], "together", inputs) for i, inputs in enumerate(sent)]
    for answer, inputs in zip(infer_together(calls), sent, strict=True):
        assert_masked(answer, inputs)
    assert_one_execution(zoo_server, "together", before, 4)


def test_each_request_of_a_batch_gets_the_outputs_it_asked_for(zoo_server: TritonServer) -> None:
    sent = [masked_request(2, length, length) for length in (3, 5, 3, 4)]
    wanted = (["mean"], ["weighted"], [], ["weighted", "mean"])
    calls = [partial(infer, zoo_server, "grpc", "together", s, w) for s, w in zip(sent, wanted, strict=True)]
    answers = infer_together(calls)
    assert [set(answer) for answer in answers] == [{"mean"}, {"weighted"}, {"mean", "weighted"}, {"mean", "weighted"}]
    np.testing.assert_array_equal(answers[0]["mean"], (sent[0]["x"] * sent[0]["mask"]).sum(1) / sent[0]["mask"].sum(1))
    np.testing.assert_array_equal(answers[1]["weighted"], sent[1]["x"] * sent[1]["mask"])
    assert_masked(answers[2], sent[2])
    assert_masked(answers[3], sent[3])


def test_what_ran_is_counted(zoo_server: TritonServer) -> None:
    """`counted` is this test's own, so its counters start at 0. Triton's page follows within a second or two."""
    sent = [masked_request(7, 4, 1), masked_request(1, 6, 2)]
    infer_together([partial(infer, zoo_server, "http", "counted", inputs) for inputs in sent])

    def counted(name: str, **labels: str) -> float:
        return total(metrics(zoo_server), f"ortgraph_{name}", model="counted", version="1", **labels)

    wait_until(lambda: counted("requests_total") == 2, "both requests were counted")
    groups = counted("group_requests_count")
    assert groups in (1, 2)
    assert counted("requests_total", outcome="answered") == 2
    assert counted("real_elements_total") == 2 * (7 * 4 + 1 * 6)
    assert counted("padded_elements_total") == (2 * 7 * 2 if groups == 1 else 0)
    assert counted("bucket_hits_total") == counted("eager_runs_total", reason="provider_cpu") == groups
    assert counted("bucket_hits_total", bucket="batch=8") == 1
    assert counted("bucket_hits_total", bucket="batch=1") == groups - 1
    assert counted("group_requests_sum") == 2
    assert counted("group_rows_sum") == 8
    assert counted("group_rows_bucket", le="+Inf") == groups
    assert counted("group_rows_bucket", le="4") == groups - 1
    assert counted("staging_seconds_count") == counted("run_seconds_count") == groups


def test_pb_364_every_request_of_a_batch_gets_one_answer_or_its_own_error(zoo_server: TritonServer) -> None:
    before = metrics(zoo_server)
    sent = [np.array([[i, i + 1]]) for i in range(8)]
    sent[3] = np.array([[3, 10]])
    sent[6] = np.array([[-11, 0]])
    answers = infer_together([partial(infer, zoo_server, "grpc", "lookup", {"ids": ids}) for ids in sent])
    for index, (answer, ids) in enumerate(zip(answers, sent, strict=True)):
        if index in (3, 6):
            assert isinstance(answer, InferenceServerException)
            assert answer.status() == "StatusCode.INVALID_ARGUMENT"
            assert "the model cannot run this request" in answer.message()
            assert "\n" not in answer.message()
        else:
            np.testing.assert_array_equal(answer["y"], TABLE[ids])
    # Triton counts a response that carries an error as a success: it has no failure of the model to report.
    assert_one_execution(zoo_server, "lookup", before, 8)


# Cancelling


def cpu_ticks(pid: int) -> int:
    """User time of a process so far."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11])


def test_server_6920_a_request_cancelled_while_queued_never_runs(zoo_server: TritonServer) -> None:
    """The first runs for seconds; the one behind it is cancelled; a third is answered."""
    before, stub = metrics(zoo_server), stub_pids(zoo_server)["slow_0"]
    done: dict[str, queue.Queue[Any]] = {name: queue.Queue() for name in ("first", "cancelled", "last")}

    def pending() -> float:
        return total(metrics(zoo_server), "nv_inference_pending_request_count", model="slow")

    with grpc_client.InferenceServerClient(zoo_server.grpc_url) as client:

        def send(name: str, steps: int) -> Any:
            inputs = {"steps": np.array([steps]), "x": np.array([1.0, 2.0], np.float32)}
            return client.async_infer(
                "slow", to_wire(grpc_client, inputs), lambda result, error: done[name].put(error or result)
            )

        idle = cpu_ticks(stub)
        send("first", SLOW_STEPS)
        wait_until(lambda: cpu_ticks(stub) > idle + 10, "the first request runs")
        context = send("cancelled", SLOW_STEPS)
        wait_until(lambda: pending() == 1, "the second request waits")
        context.cancel()
        cancelled = done["cancelled"].get(timeout=60)
        assert isinstance(cancelled, InferenceServerException)
        assert cancelled.status() == "StatusCode.CANCELLED"
        send("last", 1)
        assert done["first"].get(timeout=60).as_numpy("y").tolist() == [1.0, 2.0]
        assert done["last"].get(timeout=60).as_numpy("y").tolist() == [-1.0, -2.0]

    def grown(name: str, **labels: str) -> float:
        return total(metrics(zoo_server), name, model="slow", **labels) - total(before, name, model="slow", **labels)

    wait_until(lambda: grown("ortgraph_requests_total", outcome="answered") == 2, "two requests ran")
    assert grown("ortgraph_requests_total", outcome="refused") == 1


# Unloading


def test_unload_ends_the_process_and_metrics_outlive_a_reload(explicit_server: TritonServer) -> None:
    x = {"x": np.ones((1, 2), np.float32)}
    write(explicit_server.repository, "reloaded", graph(DOUBLED))

    def answered() -> float:
        return total(metrics(explicit_server), "ortgraph_requests_total", model="reloaded", outcome="answered")

    with grpc_client.InferenceServerClient(explicit_server.grpc_url) as client:
        client.load_model("reloaded")
        first = stubs(explicit_server)["reloaded_0"]
        assert first.region.exists()
        for _ in range(3):
            infer(explicit_server, "grpc", "reloaded", x)
        client.unload_model("reloaded")
        wait_until(lambda: "reloaded_0" not in stubs(explicit_server), "the process ended")
        wait_until(lambda: not first.region.exists(), "its shared memory was given back")
        assert answered() == 3  # what was not yet on the page was passed on by finalize
        assert not client.is_model_ready("reloaded")
        with pytest.raises(InferenceServerException, match=r"is not ready|not found|no available versions"):
            infer(explicit_server, "grpc", "reloaded", x)
        client.load_model("reloaded")
        assert client.is_model_ready("reloaded")
        infer(explicit_server, "grpc", "reloaded", x)
    wait_until(lambda: answered() == 4, "the count went on")


def test_server_7481_stopping_leaves_no_shared_memory_behind(tmp_path: Path) -> None:
    write(tmp_path / "models", "doubled", graph(DOUBLED))
    with TritonServer(tmp_path / "models", log_path=tmp_path / "triton.log") as server:
        infer(server, "http", "doubled", {"x": np.ones((4, 1 << 20), np.float32)})  # its region has grown by then
        (stub,) = stubs(server).values()
        assert stub.region.stat().st_size > 4 << 20
    assert not stub.region.exists()
    assert not Path(f"/proc/{stub.pid}").exists()
