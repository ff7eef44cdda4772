"""The clients against the real server: dtypes, errors, and what a deadline does on each side."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gevent
import ml_dtypes
import numpy as np
import psutil
import pytest

from client import (
    AsyncGrpcClient,
    AsyncHttpClient,
    ConnectionLost,
    DeadlineExceeded,
    GrpcClient,
    HttpClient,
    ServerRefused,
    TensorMetadata,
    Unreachable,
)
from ortgraph.server import TritonServer

REPOSITORY = Path(__file__).parent / "client_models"
DTYPES: dict[str, Any] = {
    "bool": np.bool_,
    "uint8": np.uint8,
    "uint16": np.uint16,
    "uint32": np.uint32,
    "uint64": np.uint64,
    "int8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "fp32": np.float32,
    "fp64": np.float64,
}
SYNC = [HttpClient, GrpcClient]
ASYNC = [AsyncHttpClient, AsyncGrpcClient]
LONG_MS = 4000
DEADLINE_S = 0.3


@pytest.fixture(scope="module")
def server(triton: Callable[..., TritonServer]) -> TritonServer:
    return triton(REPOSITORY)


def url_of(client_class: Any, server: TritonServer) -> str:
    return server.http_url if client_class in (HttpClient, AsyncHttpClient) else server.grpc_url


def infer(client_class: Any, server: TritonServer, *arguments: Any, **options: Any) -> dict[str, Any]:
    """One inference with a new client of any of the four classes."""
    if client_class in SYNC:
        with client_class(url_of(client_class, server)) as client:
            return dict(client.infer(*arguments, **options))

    async def run() -> dict[str, Any]:
        async with client_class(url_of(client_class, server)) as client:
            return dict(await client.infer(*arguments, **options))

    return asyncio.run(run())


def delay(ms: int, model: str = "client_sleep", rows: int = 1) -> dict[str, Any]:
    return {"delay_ms": np.full(1 if model == "client_sleep" else (rows, 1), ms, np.int32)}


def outcomes(server: TritonServer, model: str = "client_sleep") -> dict[str, str]:
    """What became of each request that ran, by id; waits its turn behind those that run."""
    with GrpcClient(server.grpc_url) as client:
        texts = client.infer(model, delay(0, model))["outcomes"].ravel()
    return dict(text.decode().split() for text in texts)


@pytest.mark.parametrize("client_class", SYNC + ASYNC)
@pytest.mark.parametrize("shape", [(2, 3), (1, 0), (0, 4)])
def test_every_dtype_comes_back_as_it_went(server: TritonServer, client_class: Any, shape: tuple[int, int]) -> None:
    """pb-371, client-897: BF16 is ml_dtypes.bfloat16 both ways; str and bytes come back as bytes."""
    random = np.random.default_rng(7)
    inputs = {f"in_{name}": random.integers(0, 100, shape).astype(dtype) for name, dtype in DTYPES.items()}
    texts = np.array([["é", b"\xff\x00", ""], [b"", "two words", b"x" * 70000]], dtype=object)
    inputs["in_bytes"] = texts if shape == (2, 3) else np.empty(shape, object)
    answers = infer(client_class, server, "client_echo", inputs)
    assert set(answers) == {name.replace("in_", "out_") for name in inputs}
    for name, sent in inputs.items():
        got = answers[name.replace("in_", "out_")]
        assert got.shape == shape
        if name == "in_bytes":
            assert got.ravel().tolist() == [t.encode() if isinstance(t, str) else t for t in sent.ravel()]
        else:
            assert got.dtype == sent.dtype
            assert got.tobytes() == sent.tobytes()


@pytest.mark.parametrize("client_class", SYNC + ASYNC)
def test_only_the_requested_outputs_come_back(server: TritonServer, client_class: Any) -> None:
    inputs = {"in_fp32": np.ones((1, 2), np.float32), "in_int8": np.ones((1, 2), np.int8)}
    assert list(infer(client_class, server, "client_echo", inputs, outputs=["out_int8"])) == ["out_int8"]


@pytest.mark.parametrize("client_class", SYNC + ASYNC)
def test_refusals_have_the_same_status_and_text_over_both_protocols(server: TritonServer, client_class: Any) -> None:
    cases: list[tuple[tuple[Any, ...], dict[str, Any], str, str]] = [
        (("nope", delay(0)), {}, "NOT_FOUND", "unknown model: 'nope'"),
        (("client_sleep", delay(0)), {"model_version": "7"}, "NOT_FOUND", "version 7 is not found"),
        (("client_sleep", {"x": np.zeros(1, np.float32)}), {}, "INVALID_ARGUMENT", "unexpected inference input 'x'"),
        (("client_sleep", {"delay_ms": np.zeros(1, np.float32)}), {}, "INVALID_ARGUMENT", "data-type"),
    ]
    for arguments, options, status, text in cases:
        with pytest.raises(ServerRefused) as caught:
            infer(client_class, server, *arguments, **options)
        assert (caught.value.status, text in caught.value.message) == (status, True), caught.value.message


@pytest.mark.parametrize("client_class", SYNC)
def test_questions_about_the_server(server: TritonServer, client_class: Any) -> None:
    with client_class(url_of(client_class, server)) as client:
        assert client.is_live()
        assert client.is_ready()
        assert client.is_ready("client_echo", "1")
        assert not client.is_ready("nope")
        metadata = client.metadata("client_queue")
        assert metadata.inputs == (TensorMetadata("delay_ms", "INT32", (-1, 1)),)
        assert metadata.outputs == (TensorMetadata("outcomes", "BYTES", (-1, -1)),)
        with pytest.raises(ServerRefused, match="NOT_FOUND"):
            client.metadata("nope")


@pytest.mark.parametrize("client_class", ASYNC)
def test_questions_about_the_server_asyncio(server: TritonServer, client_class: Any) -> None:
    async def run() -> None:
        async with client_class(url_of(client_class, server)) as client:
            assert await client.is_live()
            assert await client.is_ready()
            assert await client.is_ready("client_echo", "1")
            assert not await client.is_ready("nope")
            assert (await client.metadata("client_queue")).inputs == (TensorMetadata("delay_ms", "INT32", (-1, 1)),)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("client_class", "becomes"),
    [(HttpClient, "done"), (AsyncHttpClient, "done"), (GrpcClient, "cancelled"), (AsyncGrpcClient, "cancelled")],
)
def test_a_deadline_cancels_a_running_request_over_grpc(server: TritonServer, client_class: Any, becomes: str) -> None:
    """server-7369, server-5348. Over HTTP Triton 24.10 does not notice that the connection was closed."""
    name = client_class.__name__
    with pytest.raises(DeadlineExceeded, match=r"no answer within the deadline of 0\.3 s"):
        infer(client_class, server, "client_sleep", delay(1500), deadline_s=DEADLINE_S, request_id=name)
    assert outcomes(server)[name] == becomes


def test_cancelling_the_task_cancels_the_request_over_grpc(server: TritonServer) -> None:
    """server-7532."""

    async def run() -> None:
        async with AsyncGrpcClient(server.grpc_url) as client:
            task = asyncio.create_task(client.infer("client_sleep", delay(LONG_MS), request_id="task"))
            await asyncio.sleep(DEADLINE_S)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())
    assert outcomes(server).get("task") in ("cancelled", None)  # None: left the queue


@pytest.mark.parametrize(
    ("model", "client_class", "becomes"),
    [
        ("client_queue", HttpClient, None),
        ("client_queue", GrpcClient, None),
        ("client_queue", AsyncHttpClient, None),
        ("client_queue", AsyncGrpcClient, None),
        ("client_plain_queue", HttpClient, "done"),  # no default timeout: Triton ignores the request's own
        ("client_plain_queue", GrpcClient, None),
    ],
)
def test_a_deadline_takes_a_request_out_of_the_queue(
    server: TritonServer, model: str, client_class: Any, becomes: str | None
) -> None:
    """server-7369: the deadline in seconds is Triton's timeout in microseconds; what is dropped never runs."""
    name = client_class.__name__
    with ThreadPoolExecutor(4) as pool:
        holders = [pool.submit(_hold, server, model, f"{name}-holder-{number}") for number in range(4)]
        _wait_until_pending(server, model, 2)  # one runs, one may be handed to the instance already
        with pytest.raises(DeadlineExceeded):
            infer(client_class, server, model, delay(1, model), deadline_s=DEADLINE_S, request_id=name)
        for holder in holders:
            holder.result()
    seen = outcomes(server, model)
    assert [seen[f"{name}-holder-{number}"] for number in range(4)] == ["done"] * 4
    assert seen.get(name) == becomes


def _hold(server: TritonServer, model: str, name: str) -> None:
    with GrpcClient(server.grpc_url) as client:
        client.infer(model, delay(700, model, rows=2), request_id=name)


def _wait_until_pending(server: TritonServer, model: str, count: int) -> None:
    pattern = re.compile(rf'nv_inference_pending_request_count{{model="{model}",version="1"}} (\d+)')
    for _ in range(500):
        with urllib.request.urlopen(server.metrics_url) as page:
            match = pattern.search(page.read().decode())
        if match and int(match[1]) >= count:
            return
        time.sleep(0.01)
    pytest.fail(f"{model} never had {count} requests waiting")


@pytest.mark.parametrize("client_class", SYNC)
def test_a_client_goes_on_after_a_deadline(server: TritonServer, client_class: Any) -> None:
    with client_class(url_of(client_class, server)) as client:
        with pytest.raises(DeadlineExceeded):
            client.infer("client_sleep", delay(600), deadline_s=0.1)
        assert client.infer("client_echo", {"in_int8": np.ones((1, 1), np.int8)})["out_int8"] == 1


def test_threads_may_share_a_grpc_client(server: TritonServer) -> None:
    """server-1856."""
    with GrpcClient(server.grpc_url) as client, ThreadPoolExecutor(8) as pool:

        def ask(number: int) -> int:
            answer = client.infer("client_echo", {"in_int64": np.array([[number]])})
            return int(answer["out_int64"].item())

        assert list(pool.map(ask, range(100))) == list(range(100))


def test_greenlets_of_one_thread_may_share_an_http_client(server: TritonServer) -> None:
    """server-6650, server-4223, server-3671."""
    with HttpClient(server.http_url, connections=4) as client:

        def ask(number: int) -> int:
            return int(client.infer("client_echo", {"in_int64": np.array([[number]])})["out_int64"].item())

        greenlets = [gevent.spawn(ask, number) for number in range(40)]
        gevent.joinall(greenlets, raise_error=True)
        assert [greenlet.value for greenlet in greenlets] == list(range(40))


@pytest.mark.parametrize("client_class", SYNC)
def test_a_server_that_dies_under_a_request_and_one_that_is_gone(client_class: Any, tmp_path: Path) -> None:
    server = TritonServer(REPOSITORY, log_path=tmp_path / "server.log")
    with server, client_class(url_of(client_class, server)) as client:
        assert client.is_live()
        killer = threading.Timer(DEADLINE_S, _kill, (server.pid,))
        killer.start()
        with pytest.raises(ConnectionLost, match="may have run"):
            client.infer("client_sleep", delay(LONG_MS))
        killer.join()
        with pytest.raises(Unreachable, match="Connection refused"):
            client.is_live()  # repeated when gRPC notices late that the connection is gone


def _kill(server_pid: int) -> None:
    """Kill a server and its stubs, which a busy model would outlive, and remove what they leave in /dev/shm."""
    stubs = psutil.Process(server_pid).children()
    arguments = [argument for stub in stubs for argument in stub.cmdline()]
    os.killpg(server_pid, signal.SIGKILL)
    for argument in arguments:
        if argument.startswith("triton_python_backend_shm_region_"):
            Path("/dev/shm", argument).unlink(missing_ok=True)
