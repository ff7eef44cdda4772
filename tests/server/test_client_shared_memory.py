"""System shared memory with the real server: right answers, and nothing left behind on any path."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from client import (
    DeadlineExceeded,
    GrpcClient,
    HttpClient,
    InvalidInput,
    ServerRefused,
    SharedMemoryError,
    SharedRegion,
    Unreachable,
)
from client.shared_memory import SystemMemory
from ortgraph.server import TritonServer

REPOSITORY = Path(__file__).parent / "client_models"
CLIENTS = [HttpClient, GrpcClient]
INPUTS = {"in_fp32": np.arange(6, dtype=np.float32).reshape(2, 3)}


@pytest.fixture(scope="module")
def server(triton: Callable[..., TritonServer]) -> TritonServer:
    return triton(REPOSITORY)


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest, server: TritonServer) -> Iterator[Any]:
    """A client of each protocol; afterwards neither the server nor /dev/shm holds a region."""
    with request.param(server.http_url if request.param is HttpClient else server.grpc_url) as made:
        yield made
    assert regions(server) == []
    assert files() == []


def regions(server: TritonServer) -> list[str]:
    """What the server has registered."""
    with HttpClient(server.http_url) as client:
        return [each["name"] for each in client.triton.get_system_shared_memory_status()]


def files() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith("client-")]


def test_answers_equal_those_over_the_connection(client: Any) -> None:
    inputs = {
        **INPUTS,
        "in_bf16": np.array([[1.5, -2.5]], ml_dtypes.bfloat16),
        "in_bytes": np.array([["é", b"\x00"], [b"", b"long" * 100]], dtype=object),
        "in_bool": np.array([[True], [False]]),
        "in_int8": np.zeros((1, 0), np.int8),
    }
    expected = client.infer("client_echo", inputs)
    room = {"out_fp32": 24, "out_bf16": 4, "out_bytes": 1000, "out_bool": 2, "out_int8": 64}
    with SharedRegion(client, byte_size=4096) as region:
        both = region.infer("client_echo", inputs, output_bytes=room)
        inputs_only = region.infer("client_echo", inputs)
        again = region.infer("client_echo", {"in_fp32": -INPUTS["in_fp32"]}, output_bytes={"out_fp32": 24})
    assert list(inputs_only) == list(expected)
    assert set(both) == set(room)
    for name, array in expected.items():
        for answer in (both[name], inputs_only[name]):  # copies: valid after the region was closed and reused
            assert answer.dtype == array.dtype
            assert answer.tolist() == array.tolist()
    assert (again["out_fp32"] == -INPUTS["in_fp32"]).all()


def test_too_small_a_region_or_room_says_what_is_needed(client: Any) -> None:
    with SharedRegion(client, byte_size=100) as region:
        with pytest.raises(SharedMemoryError, match="needs 400 bytes, the region has 100"):
            region.infer("client_echo", {"in_fp32": np.zeros((1, 100), np.float32)})
        with pytest.raises(SharedMemoryError, match="needs 164 bytes, the region has 100"):
            region.infer("client_echo", INPUTS, output_bytes={"out_fp32": 100})
        with pytest.raises(ServerRefused, match=r"8 bytes.* should be at least 24 bytes"):
            region.infer("client_echo", INPUTS, output_bytes={"out_fp32": 8})
        assert region.infer("client_echo", INPUTS, output_bytes={"out_fp32": 24})["out_fp32"].tolist() == [
            [0, 1, 2],
            [3, 4, 5],
        ]
    with pytest.raises(InvalidInput, match="byte_size must be 1 or more"):
        SharedRegion(client, byte_size=0)


def test_an_error_inside_the_block_leaves_nothing(client: Any) -> None:
    with pytest.raises(ZeroDivisionError), SharedRegion(client, byte_size=100):
        raise ZeroDivisionError


def test_closing_twice_is_safe_and_later_calls_say_closed(client: Any) -> None:
    region = SharedRegion(client, byte_size=100)
    region.close()
    region.close()
    with pytest.raises(SharedMemoryError, match="was closed"):
        region.infer("client_echo", INPUTS)


def test_a_dropped_region_is_given_back(client: Any) -> None:
    region = SharedRegion(client, byte_size=100)
    name = region.name
    del region
    assert name not in files()


def test_after_a_deadline_the_region_waits_for_the_server_to_let_go(client: Any) -> None:
    """The server may still use it: Triton refuses to unregister until then, and a new request must not overwrite it."""
    slow, ask = ({"delay_ms": np.array([ms], np.int32)} for ms in (700, 0))
    with SharedRegion(client, byte_size=1 << 16) as region:
        with pytest.raises(DeadlineExceeded):
            region.infer("client_sleep", slow, output_bytes={"outcomes": 1 << 15}, deadline_s=0.2)
        assert len(region.infer("client_sleep", ask, output_bytes={"outcomes": 1 << 15})["outcomes"]) > 0
        with pytest.raises(DeadlineExceeded):
            region.infer("client_sleep", slow, output_bytes={"outcomes": 1 << 15}, deadline_s=0.2)


class MemoryElsewhere(SystemMemory):
    """A region that the server does not find, as one in another container's /dev/shm."""

    def register(self, client: Any, deadline_s: float | None) -> None:
        here = f"/dev/shm/{self.name}"
        os.rename(here, f"{here}-elsewhere")
        try:
            super().register(client, deadline_s)
        finally:
            os.rename(f"{here}-elsewhere", here)


def test_a_region_that_the_server_cannot_open_says_why(client: Any) -> None:
    """server-2296, server-4685: the server and the client do not share /dev/shm."""
    with pytest.raises(SharedMemoryError, match="--ipc=host") as caught:
        SharedRegion(client, byte_size=100, memory=MemoryElsewhere(100))
    assert "Unable to open shared memory region" in str(caught.value)


def test_without_a_server_nothing_is_left() -> None:
    with GrpcClient("127.0.0.1:1") as client, pytest.raises(Unreachable):
        SharedRegion(client, byte_size=100)
    assert files() == []


def test_more_than_dev_shm_holds_is_an_error_and_no_crash(client: Any) -> None:
    space = os.statvfs("/dev/shm")
    too_much = space.f_frsize * space.f_bavail + (1 << 30)
    with pytest.raises(SharedMemoryError, match="/dev/shm is too small or full"):
        SharedRegion(client, byte_size=too_much)


@pytest.mark.parametrize("ending", ["sys.exit(3)", "raise KeyboardInterrupt", "1 / 0"])
def test_a_program_that_ends_without_closing_leaves_nothing(server: TritonServer, ending: str) -> None:
    program = f"""
import sys
from client import HttpClient, SharedRegion
region = SharedRegion(HttpClient("{server.http_url}"), byte_size=100)
print(region.name)
{ending}
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60
    )
    assert re.fullmatch(r"client-\d+-\w+\n", done.stdout), done.stderr
    assert done.returncode != 0
    assert "leaked" not in done.stderr
    assert regions(server) == []
    assert files() == []
