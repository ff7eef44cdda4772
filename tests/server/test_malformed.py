"""Two hundred malformed requests while good clients work: each gets its error, the others their answers."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from ortgraph.server import TritonServer
from tests.server.malformed import PATH, good_json, grpc_requests, http_requests, send_grpc, send_http
from tests.server.reference import assert_same, line_image, plain, token_rows
from tests.server.wire import PROTOCOLS, infer, stub_pids

# What Triton itself says of bytes that it cannot parse, before any model sees them. It calls that an internal error.
TRITON_CANNOT_PARSE = ("Unable to parse ", "failed to parse the request JSON buffer")
CLIENT_ERRORS = {"INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED"}


@contextmanager
def good_clients(server: TritonServer) -> Iterator[None]:
    """Four clients, HTTP and gRPC to both models, each comparing every answer with plain onnxruntime's.

    On leaving, a wrong answer raises; so does a client that has had none.
    """
    work: list[tuple[str, str, list[Any]]] = []
    for seed, protocol in enumerate(PROTOCOLS):
        texts = [token_rows(1 + i % 3, 4 + 3 * i, 10 * seed + i) for i in range(6)]
        lines = [line_image(1, 320, 10 * seed), line_image(2, 320, 10 * seed + 1)]
        work.append((protocol, "text_embedding", [(s, plain("text_embedding", s)) for s in texts]))
        work.append((protocol, "text_recognition", [(s, plain("text_recognition", s)) for s in lines]))
    is_over = threading.Event()
    right = [0] * len(work)
    wrong: list[BaseException] = []

    def client(place: int) -> None:
        protocol, model, pairs = work[place]
        try:
            while not is_over.is_set():
                sent, wanted = pairs[right[place] % len(pairs)]
                assert_same(infer(server, protocol, model, sent), wanted)
                right[place] += 1
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=client, args=(place,)) for place in range(len(work))]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert not wrong, wrong[0]
    assert min(right) > 0


def check_http(server: TritonServer) -> int:
    """Send all; a fresh connection where Triton closed the last one."""
    sent = 0
    for request in http_requests():
        connection = http.client.HTTPConnection(server.http_url, timeout=60)
        status, body = send_http(connection, request)
        connection.close()
        sent += 1
        if status == 500:
            assert json.loads(body)["error"].startswith(TRITON_CANNOT_PARSE), (request.name, body)
        else:
            assert 400 <= status < 500, (request.name, status, body[:200])
        assert b"Traceback" not in body, request.name
    return sent


def check_grpc(server: TritonServer) -> int:
    sent = 0
    with grpc.insecure_channel(server.grpc_url) as channel:
        for request in grpc_requests():
            status, text = send_grpc(channel, request)
            sent += 1
            if status == "INTERNAL":
                assert text == "Unable to parse request", (request.name, text)  # gRPC's own word for a broken message
            else:
                assert status in CLIENT_ERRORS, (request.name, status, text)
            assert "Traceback" not in text, request.name
    return sent


def test_every_bad_request_gets_its_error_and_every_good_one_its_answer(sample_server: TritonServer) -> None:
    before = stub_pids(sample_server)
    with good_clients(sample_server):
        sent = check_http(sample_server) + check_grpc(sample_server)
    assert sent >= 200
    assert stub_pids(sample_server) == before
    assert {model.state for model in sample_server.models()} == {"READY"}


def test_connections_dropped_in_the_middle_of_a_body(sample_server: TritonServer) -> None:
    """No answer can reach such a client; the server and everyone else go on."""
    body = json.dumps(good_json()).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: test\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    host, port = sample_server.http_url.split(":")
    before = stub_pids(sample_server)
    with good_clients(sample_server):
        for cut in (0, 1, len(body) // 2, len(body) - 1):
            with socket.create_connection((host, int(port)), timeout=60) as connection:
                connection.sendall(head + body[:cut])
    assert stub_pids(sample_server) == before


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf, 3e38])
def test_not_a_number_is_data_and_stays_in_its_row(sample_server: TritonServer, special: float) -> None:
    sent = line_image(1, 320, 5)
    sent["x"][0, 1, 20, 100:200] = special
    wanted = plain("text_recognition", sent)
    with good_clients(sample_server):
        for protocol in PROTOCOLS * 2:
            assert_same(infer(sample_server, protocol, "text_recognition", sent), wanted)
