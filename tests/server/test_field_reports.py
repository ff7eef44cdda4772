"""What users of Triton and ONNX Runtime have reported, one test a report; docs/field-reports.md lists them all.

Test names begin with the report: `server_` is triton-inference-server/server, `pb_` its python_backend, `ortbe_` its
onnxruntime_backend, `ort_` microsoft/onnxruntime.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tritonclient.utils import InferenceServerException

from ortgraph import Engine, parse
from ortgraph.server import ROOT, TritonServer
from tests.server.repository import TYPES, graph, write
from tests.server.wire import PROTOCOLS, infer, infer_together, metrics, stub_pids, total, wait_until
from tests.server.zoo import DOUBLED, MASKED

both_protocols = pytest.mark.parametrize("protocol", PROTOCOLS)
Array = np.ndarray[Any, Any]


def masked(rows: int, length: int) -> dict[str, Array]:
    x = np.arange(1, rows * length + 1, dtype=np.float32).reshape(rows, length)
    return {"x": x, "mask": np.ones_like(x)}


def echoed_types(shape: tuple[int, ...]) -> dict[str, Array]:
    arrays = {name: np.ones(shape, ml_dtypes.bfloat16 if name == "BF16" else _numpy(name)) for name in TYPES}
    return {f"in_{name}": array for name, array in arrays.items()}


def _numpy(name: str) -> Any:
    return {"BOOL": np.bool_, "FP16": np.float16, "FP32": np.float32, "FP64": np.float64}.get(name) or name.lower()


# Python backend: tensors


@both_protocols
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1)])
def test_server_6102_axes_of_size_one(zoo_server: TritonServer, protocol: str, shape: tuple[int, ...]) -> None:
    for model in ("types", "types_unbatched"):
        sent = echoed_types(shape)
        got = infer(zoo_server, protocol, model, sent)
        for name in TYPES:
            assert got[f"out_{name}"].tobytes() == sent[f"in_{name}"].tobytes()
            assert got[f"out_{name}"].shape == shape


def test_server_5494_outputs_that_were_cut_out_of_a_batch_are_whole(zoo_server: TritonServer) -> None:
    """Slices of a padded batch are strided; Triton takes C order only."""
    sent = [masked(2, 3), masked(6, 7)]
    answers = infer_together([partial(infer, zoo_server, "grpc", "together", inputs) for inputs in sent])
    for answer, inputs in zip(answers, sent, strict=True):
        np.testing.assert_array_equal(answer["weighted"], inputs["x"])
        np.testing.assert_array_equal(answer["mean"], inputs["x"].mean(1))


@both_protocols
def test_pb_371_bfloat16_is_exact(zoo_server: TritonServer, protocol: str) -> None:
    """numpy has no bfloat16; the client sends ml_dtypes' and every one of the 65536 words comes back as it was."""
    words = np.arange(1 << 16, dtype=np.uint16).reshape(1, -1)
    sent = echoed_types(words.shape) | {"in_BF16": words.view(ml_dtypes.bfloat16)}
    got = infer(zoo_server, protocol, "types", sent)["out_BF16"]
    assert got.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(got.view(np.uint16), words)


def test_server_7853_bfloat16_is_computed_with(explicit_server: TritonServer) -> None:
    """Cast inside the model: the words mean numbers, not bit patterns."""
    text = """(bfloat16[batch, n] x) => (float[batch, n] y, bfloat16[batch, n] z) {
        y = Cast<to = 1>(x)
        more = Add(y, y)
        z = Cast<to = 16>(more)
    }"""
    write(explicit_server.repository, "bfloat16", graph(text))
    with grpc_client.InferenceServerClient(explicit_server.grpc_url) as client:
        client.load_model("bfloat16")
    x = np.array([[1.0, -2.5, 3.140625, 1e38]], ml_dtypes.bfloat16)
    got = infer(explicit_server, "http", "bfloat16", {"x": x})
    np.testing.assert_array_equal(got["y"], x.astype(np.float32))
    np.testing.assert_array_equal(got["z"], x + x)


@both_protocols
def test_ort_22061_bool_stays_bool(zoo_server: TritonServer, protocol: str) -> None:
    sent = echoed_types((2, 3)) | {"in_BOOL": np.array([[True, False, True], [False, False, True]])}
    got = infer(zoo_server, protocol, "types", sent)["out_BOOL"]
    assert got.dtype == np.bool_
    np.testing.assert_array_equal(got, sent["in_BOOL"])


def test_pb_87_inputs_may_stay_where_they_arrive(zoo_server: TritonServer) -> None:
    """FORCE_CPU_ONLY_INPUT_TENSORS "no" is accepted; where there is no GPU it changes nothing."""
    x = np.array([[1.0, 2.0]], np.float32)
    np.testing.assert_array_equal(infer(zoo_server, "http", "tuned", {"x": x})["y"], 2 * x)


# Python backend: the process


def test_server_7230_a_dead_process_answers_with_errors_and_harms_no_other_model(explicit_server: TritonServer) -> None:
    """Triton 24.10 goes on calling the model ready, and cannot load it again: only an inference tells."""
    x = np.array([[1.0, 2.0]], np.float32)
    assert infer(explicit_server, "http", "doomed", {"x": x})["y"].tolist() == [[2.0, 4.0]]
    os.kill(stub_pids(explicit_server)["doomed_0"], signal.SIGKILL)
    for protocol in PROTOCOLS * 2:
        with pytest.raises(InferenceServerException, match="Stub process 'doomed_0' is not healthy"):
            infer(explicit_server, protocol, "doomed", {"x": x})
        assert infer(explicit_server, protocol, "doubled", {"x": x})["y"].tolist() == [[2.0, 4.0]]


def test_server_6901_the_process_loads_onnxruntime_and_numpy_only(zoo_server: TritonServer) -> None:
    for name, pid in stub_pids(zoo_server).items():
        mapped = set(re.findall(r"site-packages/([^/\s]+)/", Path(f"/proc/{pid}/maps").read_text()))
        assert {"numpy", "onnxruntime"} <= mapped, name
        assert mapped <= {"numpy", "numpy.libs", "onnxruntime", "onnxruntime_gpu.libs"}, name


def test_server_8278_what_a_config_of_one_line_can_and_cannot_say(zoo_server: TritonServer) -> None:
    """Triton's completion cannot ask for ragged batches: `allow_ragged_batch` has to be written."""
    with http_client.InferenceServerClient(zoo_server.http_url) as client:
        completed, written = client.get_model_config("types"), client.get_model_config("together")
    assert not any(tensor["allow_ragged_batch"] for tensor in completed["input"])
    assert all(tensor["allow_ragged_batch"] for tensor in written["input"])


def test_server_5129_model_warmup_is_run_before_the_model_is_ready(zoo_server: TritonServer) -> None:
    """The warm-up's request reaches the model: it is counted like any other."""
    rows = {"model": "tuned", "le": "2"}
    wait_until(lambda: total(metrics(zoo_server), "ortgraph_group_rows_bucket", **rows) >= 1, "the warm-up was counted")
    assert zoo_server.log_path.read_text().count("ortgraph: tuned version 1") == 1


def test_miniray_93_a_load_over_grpc_holds_up_nobody(explicit_server: TritonServer) -> None:
    x = np.array([[1.0, 2.0]], np.float32)
    write(explicit_server.repository, "late", graph(MASKED))
    failures: list[BaseException] = []

    def load() -> None:
        try:
            with grpc_client.InferenceServerClient(explicit_server.grpc_url) as client:
                client.load_model("late")
        except BaseException as error:
            failures.append(error)

    loading = threading.Thread(target=load)
    loading.start()
    answered_while_loading = 0
    while loading.is_alive():
        assert infer(explicit_server, "http", "doubled", {"x": x})["y"].tolist() == [[2.0, 4.0]]
        answered_while_loading += loading.is_alive()
    loading.join()
    assert not failures
    assert answered_while_loading > 0
    np.testing.assert_array_equal(infer(explicit_server, "http", "late", masked(1, 3))["mean"], [2.0])


# Triton's ONNX Runtime backend and scheduler


def test_ortbe_265_thread_counts_are_set_and_said(zoo_server: TritonServer) -> None:
    lines = [line for line in zoo_server.log_path.read_text().splitlines() if "loaded and checked" in line]
    (tuned,) = (line for line in lines if "ortgraph: tuned" in line)
    (other,) = (line for line in lines if "ortgraph: masked" in line)
    assert "intra-op threads: 1" in tuned
    assert "intra-op threads: one a core" in other


def test_ortbe_102_memory_does_not_grow_with_shapes(zoo_server: TritonServer) -> None:
    """After every length was seen once, seeing them all again takes no more memory (1 MB is the allocator's own)."""
    pid = stub_pids(zoo_server)["masked_0"]

    def resident_kb() -> int:
        return int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0])

    def every_length() -> None:
        for length in range(1, 20_000, 400):
            infer(zoo_server, "grpc", "masked", masked(2, length))

    every_length()
    every_length()
    before = resident_kb()
    for _ in range(3):
        every_length()
    assert resident_kb() - before <= 1024


@both_protocols
def test_server_7124_padding_to_a_static_batch(zoo_server: TritonServer, protocol: str) -> None:
    """Any 1 to 8 rows of length 1 to 16 go through the one bucket of 8 rows of 16, and no answer shows it."""
    hits = partial(total, name="ortgraph_bucket_hits_total", model="static", bucket="batch=8,length=16")
    sent = [masked(rows, length) for rows in range(1, 9) for length in (1, 5, 15, 16)]
    for inputs in sent:
        answer = infer(zoo_server, protocol, "static", inputs)
        np.testing.assert_array_equal(answer["weighted"], inputs["x"])
        np.testing.assert_allclose(answer["mean"], inputs["x"].mean(1), rtol=1e-6)
    expected = len(sent) * (PROTOCOLS.index(protocol) + 1)
    wait_until(lambda: hits(metrics(zoo_server)) == expected, "every request hit that bucket")


def below_zero() -> list[dict[str, Array]]:
    """Rows whose maximum is below zero, so that padding with zero would show."""
    return [{"x": -np.arange(1, 2 + length, dtype=np.float32)[None, ::-1].copy()} for length in range(8)]


def test_ortbe_21_the_pad_value_is_the_models_own(zoo_server: TritonServer) -> None:
    """BERT pads with [PAD], a maximum with minus infinity: `pad_values` says which."""
    sent = below_zero()
    before = metrics(zoo_server)
    answers = infer_together([partial(infer, zoo_server, "grpc", "maximum", inputs) for inputs in sent])
    assert [answer["y"].tolist() for answer in answers] == [[[-1.0]]] * 8
    after = metrics(zoo_server)
    for name, grown in (("nv_inference_exec_count", 1), ("nv_inference_request_success", 8)):
        assert total(after, name, model="maximum") - total(before, name, model="maximum") == grown
    wait_until(
        lambda: total(metrics(zoo_server), "ortgraph_group_requests_sum", model="maximum") == 8, "all were counted"
    )
    found = metrics(zoo_server)
    assert total(found, "ortgraph_group_requests_count", model="maximum") < 8
    assert total(found, "ortgraph_padded_elements_total", model="maximum") > 0


def test_server_8156_what_padding_would_change_is_never_padded(zoo_server: TritonServer) -> None:
    """The same model without its pad value: found out at load, said in the log, and every answer is right."""
    model = "maximum_never_padded"
    answers = infer_together([partial(infer, zoo_server, "grpc", model, inputs) for inputs in below_zero()])
    assert [answer["y"].tolist() for answer in answers] == [[[-1.0]]] * 8
    wait_until(lambda: total(metrics(zoo_server), "ortgraph_group_requests_sum", model=model) == 8, "all were counted")
    assert total(metrics(zoo_server), "ortgraph_padded_elements_total", model=model) == 0
    assert f"ortgraph: {model}: dimension 'length' is never padded" in zoo_server.log_path.read_text()


# ONNX Runtime


def test_ort_10299_inputs_may_be_strided_and_dropped(tmp_path: Path) -> None:
    """ONNX Runtime keeps only a pointer to what is bound: the engine keeps the memory, and makes it contiguous."""
    folder = write(tmp_path, "doubled", graph(DOUBLED))
    config = {"name": "doubled", "max_batch_size": 8, "parameters": {}}
    engine = Engine.load(parse(config, model_path=folder / "1" / "model.onnx"))
    whole = np.arange(48, dtype=np.float32).reshape(8, 6)
    for part in (whole[:, ::2], whole[::-1], whole.T[:, :5], whole[2:3, 1:4]):
        wanted = (part + part).copy()
        answer = engine.run({"x": part * 1})
        gc.collect()
        np.testing.assert_array_equal(engine.run({"x": part})["y"], wanted)
        np.testing.assert_array_equal(answer["y"], wanted)
    engine.close()


# Clients and load tests


def test_server_1776_more_than_4_mb_over_grpc(explicit_server: TritonServer) -> None:
    x = np.arange(3 << 20, dtype=np.float32).reshape(3, -1)
    np.testing.assert_array_equal(infer(explicit_server, "grpc", "doubled", {"x": x})["y"], x + x)


def test_server_5622_locust_and_tritonclient_in_one_environment() -> None:
    script = "import locust, tritonclient.grpc, tritonclient.http; print('both')"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (found.returncode, found.stdout.strip()) == (0, "both"), found.stderr


# The list itself


def test_every_test_that_the_list_names_exists() -> None:
    listed = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "field-reports.md").read_text()))
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    existing = set(re.findall(r"^(?:async )?def (test_\w+)", sources, re.MULTILINE))
    assert listed
    assert listed - existing == set()
    own = set(re.findall(r"^def (test_(?!every_)\w+)", Path(__file__).read_text(), re.MULTILINE))
    assert own - listed == set()
