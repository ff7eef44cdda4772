"""Deadlines, repeats, addresses and error texts, on real sockets of this machine."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from client import (
    AsyncGrpcClient,
    AsyncHttpClient,
    ClientClosed,
    ClientError,
    ConnectionLost,
    DeadlineExceeded,
    GrpcClient,
    HttpClient,
    InvalidInput,
    Retry,
    ServerRefused,
    Unreachable,
    WrongOwner,
    connect,
)
from client.calls import Deadline, server_timeout_us
from client.errors import from_triton
from client.urls import parse

FAST = Retry(attempts=3, first_wait_s=0.0, longest_wait_s=0.0)
FAST_INFER = Retry(attempts=3, first_wait_s=0.0, longest_wait_s=0.0, infer=True)
INPUTS = {"x": np.zeros((1, 4), np.float32)}
URL = "127.0.0.1:1"


class Listener:
    """A server that counts connections and treats each as `behave` says."""

    def __init__(self, behave: Callable[[socket.socket], None]) -> None:
        self.connections = 0
        self._behave = behave
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            self._open.append(connection)
            if self._is_ending:
                return
            self.connections += 1
            self._behave(connection)

    _is_ending = False

    def close(self) -> None:
        self._is_ending = True
        socket.create_connection(self._socket.getsockname()).close()
        self._thread.join()
        for each in (self._socket, *self._open):
            each.close()


@contextmanager
def listening(behave: Callable[[socket.socket], None]) -> Iterator[Listener]:
    listener = Listener(behave)
    try:
        yield listener
    finally:
        listener.close()


def hang_up(connection: socket.socket) -> None:
    """Take the request, then close without an answer."""
    connection.recv(65536)
    connection.close()


def cut_short(connection: socket.socket) -> None:
    """Announce an answer of 100 bytes and send 3."""
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{  ")
    connection.close()


def stay_silent(connection: socket.socket) -> None:
    """Never read, never answer."""


def outcome(url: str, is_async: bool, call: str, **options: Any) -> type[BaseException]:
    """The type of error of one HTTP call."""

    def arguments(client: Any) -> Any:
        return client.infer("model", INPUTS) if call == "infer" else client.is_live()

    async def run() -> None:
        async with AsyncHttpClient(url, **options) as client:
            await arguments(client)

    with pytest.raises(ClientError) as caught:
        if is_async:
            asyncio.run(run())
        else:
            with HttpClient(url, **options) as client:
                arguments(client)
    return caught.type


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("retry", "attempts"), [(FAST, 1), (FAST_INFER, 3)])
def test_an_inference_that_may_have_run_is_repeated_only_on_request(
    is_async: bool, retry: Retry, attempts: int
) -> None:
    with listening(hang_up) as listener:
        assert outcome(listener.url, is_async, "infer", retry=retry) is ConnectionLost
        assert listener.connections == attempts


@pytest.mark.parametrize("is_async", [False, True])
def test_an_answer_cut_short_is_a_lost_connection(is_async: bool) -> None:
    with listening(cut_short) as listener:
        assert outcome(listener.url, is_async, "infer", retry=FAST) is ConnectionLost
        assert listener.connections == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_questions_are_repeated_after_a_lost_connection(is_async: bool) -> None:
    with listening(hang_up) as listener:
        assert outcome(listener.url, is_async, "is_live", retry=FAST) is ConnectionLost
        assert listener.connections >= 3  # the HTTP libraries underneath repeat a GET as well


@pytest.mark.parametrize("client_class", [HttpClient, GrpcClient])
def test_a_refused_connection_is_repeated_and_then_named(client_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(client_class, "_sleep", staticmethod(waits.append))
    with client_class(URL) as client, pytest.raises(Unreachable, match=r"127\.0\.0\.1:1: Connection refused"):
        client.infer("model", INPUTS)
    assert len(waits) == 2
    assert 0.05 <= waits[0] <= 0.1 <= waits[1] <= 0.2


@pytest.mark.parametrize("client_class", [AsyncHttpClient, AsyncGrpcClient])
def test_asyncio_names_a_refused_connection(client_class: Any) -> None:
    async def run() -> None:
        async with client_class(URL, retry=FAST) as client:
            await client.infer("model", INPUTS)

    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1: Connection refused"):
        asyncio.run(run())


@pytest.mark.parametrize("client_class", [HttpClient, GrpcClient])
def test_an_unknown_host_is_unreachable(client_class: Any) -> None:
    client = client_class("no-such-host.invalid:8000", retry=Retry(attempts=1))
    with client, pytest.raises(Unreachable, match=r"no-such-host\.invalid:8000: "):
        client.is_live(deadline_s=20)


@pytest.mark.parametrize("is_async", [False, True])
def test_the_deadline_ends_a_call_to_a_server_that_does_not_answer(is_async: bool) -> None:
    with listening(stay_silent) as listener:
        assert outcome(listener.url, is_async, "infer", deadline_s=0.1) is DeadlineExceeded


# geventhttpclient leaves a socket that is cut off while sending to the collector, which closes it with a warning.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_deadline_ends_a_call_in_the_middle_of_sending() -> None:
    large = {"x": np.zeros((1, 4 << 20), np.float32)}
    with listening(stay_silent) as listener, HttpClient(listener.url, deadline_s=1.0) as client:
        for _ in range(2):  # the second must not wait for the connection of the first
            with pytest.raises(DeadlineExceeded):
                client.infer("model", large)
        assert listener.connections == 2


def test_a_wait_longer_than_the_deadline_is_not_waited() -> None:
    retry = Retry(first_wait_s=1000.0, longest_wait_s=1000.0)
    with HttpClient(URL, retry=retry, deadline_s=30.0) as client, pytest.raises(Unreachable):
        client.is_live()


def test_waits_double_up_to_the_longest_and_only_safe_errors_are_repeated() -> None:
    retry, deadline = Retry(attempts=9, first_wait_s=0.1, longest_wait_s=0.4), Deadline(math.inf, URL)

    def wait_s(attempt: int, error: ClientError, is_repeatable: bool = True) -> float:
        waited_s = retry.wait_s(attempt, error, is_repeatable, deadline)
        return -1.0 if waited_s is None else waited_s

    for attempt, full_s in enumerate((0.1, 0.2, 0.4, 0.4), start=1):
        assert full_s / 2 <= wait_s(attempt, Unreachable()) <= full_s
    assert wait_s(9, Unreachable()) == -1.0
    assert wait_s(1, ConnectionLost(), is_repeatable=False) == -1.0
    for error in (DeadlineExceeded(), ServerRefused("UNAVAILABLE", "queue is full"), InvalidInput()):
        assert wait_s(1, error) == -1.0


def test_deadlines_are_seconds_here_and_microseconds_on_the_server() -> None:
    assert server_timeout_us(2.5) == 2_500_000
    assert server_timeout_us(1e-9) == 1  # 0 would mean none
    assert server_timeout_us(None) is None
    assert Deadline(math.inf, URL).remaining_s() is None


@pytest.mark.parametrize("deadline_s", [0, -1, math.nan])
def test_a_deadline_must_be_positive(deadline_s: float) -> None:
    for client_class in (HttpClient, GrpcClient, AsyncHttpClient, AsyncGrpcClient):
        with pytest.raises(InvalidInput, match="deadline_s must be more than 0"):
            client_class(URL, deadline_s=deadline_s)
    with GrpcClient(URL) as client, pytest.raises(InvalidInput, match="deadline_s must be more than 0"):
        client.is_live(deadline_s=deadline_s)


@pytest.mark.parametrize("options", [{"attempts": 0}, {"first_wait_s": -1.0}, {"first_wait_s": 3.0}])
def test_a_bad_retry_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="Retry"):
        Retry(**options)


def test_http_client_stays_in_its_thread() -> None:
    """server-6650, server-3808, server-1803, pytriton-63: say so instead of gevent's greenlet errors."""
    caught: list[BaseException] = []

    def use(client: HttpClient) -> None:
        try:
            client.is_live()
        except WrongOwner as error:
            caught.append(error)

    with HttpClient(URL) as client:
        thread = threading.Thread(target=use, args=(client,))
        thread.start()
        thread.join()
    assert "belongs to thread" in str(caught[0])
    assert "GrpcClient" in str(caught[0])


def test_asyncio_client_stays_in_its_loop() -> None:
    client = AsyncHttpClient(URL, retry=FAST)

    async def use() -> None:
        await client.is_live()

    with pytest.raises(Unreachable):
        asyncio.run(use())
    with pytest.raises(WrongOwner, match="another event loop"):
        asyncio.run(use())
    asyncio.run(client.close())


@pytest.mark.parametrize("client_class", [HttpClient, GrpcClient])
def test_closing_twice_is_safe_and_later_calls_say_closed(client_class: Any) -> None:
    client = client_class(URL)
    client.close()
    client.close()
    with pytest.raises(ClientClosed, match="was closed"):
        client.is_live()


@pytest.mark.parametrize("client_class", [AsyncHttpClient, AsyncGrpcClient])
def test_asyncio_closing_twice_is_safe_and_later_calls_say_closed(client_class: Any) -> None:
    async def run() -> None:
        client = client_class(URL)
        await client.close()
        await client.close()
        with pytest.raises(ClientClosed, match="was closed"):
            await client.is_live()

    asyncio.run(run())


def test_addresses() -> None:
    assert parse("127.0.0.1:8000", "http").url == "http://127.0.0.1:8000"
    assert parse("https://example.org:443/triton/", "http").host_port == "example.org:443/triton"
    assert parse("grpcs://example.org:443", "grpc").has_tls
    assert not parse("[::1]:8001", "grpc").has_tls
    for url in ("grpc://127.0.0.1:8001", "127.0.0.1", ":8000", "", "http://x:port"):
        with pytest.raises(InvalidInput, match="url must"):
            parse(url, "http")


def test_connect_picks_the_client_by_scheme() -> None:
    with connect("http://127.0.0.1:1") as http, connect("grpc://127.0.0.1:1", deadline_s=1.0) as grpc:
        assert isinstance(http, HttpClient)
        assert isinstance(grpc, GrpcClient)
    with pytest.raises(InvalidInput, match="url must start with"):
        connect("127.0.0.1:8000")


@pytest.mark.parametrize(
    ("status", "message", "error", "shown"),
    [
        ("404", "no model", ServerRefused, "NOT_FOUND"),
        ("StatusCode.NOT_FOUND", "no model", ServerRefused, "NOT_FOUND"),
        ("400", "bad shape", ServerRefused, "INVALID_ARGUMENT"),
        ("503", "Request timeout expired", DeadlineExceeded, "queue"),
        ("StatusCode.UNAVAILABLE", "Request timeout expired", DeadlineExceeded, "queue"),
        ("StatusCode.DEADLINE_EXCEEDED", "Deadline Exceeded", DeadlineExceeded, "2 s"),
        ("503", "Exceeds maximum queue size", ServerRefused, "UNAVAILABLE"),
        ("StatusCode.UNAVAILABLE", "Exceeds maximum queue size", ServerRefused, "UNAVAILABLE"),
        ("StatusCode.UNAVAILABLE", "Socket closed", ConnectionLost, "may have run"),
        (None, "odd", ServerRefused, "UNKNOWN"),
    ],
)
def test_statuses_of_both_protocols_become_one_tree(
    status: str | None, message: str, error: type[ClientError], shown: str
) -> None:
    made = from_triton(InferenceServerException(message, status=status), URL, 2.0)
    assert type(made) is error
    assert shown in str(made)
    assert "\n" not in str(made)
