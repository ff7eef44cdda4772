"""Fixtures that start the real server. Each server has free ports on 127.0.0.1 and is ended by its process id."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ortgraph.server import ROOT, TritonServer

StartServer = Callable[..., TritonServer]


@pytest.fixture(scope="module")
def triton() -> Iterator[StartServer]:
    """A function that starts a server on a model repository; all are stopped after the module."""
    with ExitStack() as servers:

        def start(repository: Path, **options: Any) -> TritonServer:
            return servers.enter_context(TritonServer(repository, **options))

        yield start


@pytest.fixture(scope="session")
def sample_server() -> Iterator[TritonServer]:
    """A server on the sample models, both loaded (`make models` builds them)."""
    repository = ROOT / "model_repository"
    missing = [p.parent.name for p in repository.glob("*/config.pbtxt") if not (p.parent / "1" / "model.onnx").exists()]
    if missing:
        pytest.fail(f"{', '.join(missing)}: run 'make models' first")
    with TritonServer(repository) as server:
        assert {model.state for model in server.models()} == {"READY"}, server.models()
        yield server
