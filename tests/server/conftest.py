"""Servers of the real-server tests, started once for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ortgraph.server import TritonServer
from tests.server import zoo
from tests.server.repository import graph, write
from tests.server.wire import stubs


@pytest.fixture(scope="session")
def zoo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server with every small model of zoo.py."""
    repository: Path = tmp_path_factory.mktemp("zoo") / "models"
    zoo.write_zoo(repository)
    with TritonServer(repository, log_path=repository.parent / "triton.log") as server:
        unavailable = [(model.name, model.reason) for model in server.models() if model.state != "READY"]
        assert not unavailable
        yield server


@pytest.fixture(scope="session")
def explicit_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server that loads and unloads on request; `doubled` and `doomed` are loaded, tests add models of their own."""
    repository: Path = tmp_path_factory.mktemp("explicit") / "models"
    for name in ("doubled", "doomed"):
        write(repository, name, graph(zoo.DOUBLED))
    # A model whose process was killed cannot be unloaded (Triton 24.10): do not wait for it at the end.
    arguments = ("--model-control-mode=explicit", "--load-model=*", "--exit-timeout-secs=3")
    with TritonServer(repository, log_path=repository.parent / "triton.log", extra_args=arguments) as server:
        used = {stub.region for stub in stubs(server).values()}
        yield server
        used |= {stub.region for stub in stubs(server).values()}
    for region in used:  # what a server that does not wait for its models leaves in /dev/shm
        region.unlink(missing_ok=True)
