"""Servers of the real-server tests, started once for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ortgraph.server import TritonServer
from tests.server import zoo


@pytest.fixture(scope="session")
def zoo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server with every small model of zoo.py."""
    repository: Path = tmp_path_factory.mktemp("zoo") / "models"
    zoo.write_zoo(repository)
    with TritonServer(repository, log_path=repository.parent / "triton.log") as server:
        unavailable = [(model.name, model.reason) for model in server.models() if model.state != "READY"]
        assert not unavailable
        yield server
