"""What the example commands share: their options and their one-line errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from client.errors import ClientError, ServerRefused, Unreachable

MODEL_REPOSITORY = Path(__file__).resolve().parents[1] / "model_repository"


class Protocol(StrEnum):
    """How to reach the server."""

    http = "http"
    grpc = "grpc"


Url = Annotated[
    str | None, typer.Option(help="HOST:PORT of the server; without it 127.0.0.1:8000, for gRPC 127.0.0.1:8001.")
]
ProtocolOption = Annotated[Protocol, typer.Option(help="How to reach the server.")]
DeadlineS = Annotated[float, typer.Option(help="Seconds to wait for the answers.")]


def server_url(url: str | None, protocol: Protocol) -> str:
    """The address to use: the one given, or the default of `make serve`."""
    return url or ("127.0.0.1:8000" if protocol is Protocol.http else "127.0.0.1:8001")


class BadFile(Exception):
    """A file of the command line that cannot be used; the text is one line."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End with exit code 1 and one line on stderr when a file or the server is at fault."""
    try:
        yield
    except (ClientError, BadFile) as error:
        Console(stderr=True, soft_wrap=True).print(f"error: {error}{_hint(error)}", markup=False, highlight=False)
        raise typer.Exit(1) from None


def _hint(error: Exception) -> str:
    if isinstance(error, Unreachable):
        return "; is the server running? `make serve` starts it, --url says where it is"
    if isinstance(error, ServerRefused) and error.status in ("NOT_FOUND", "UNAVAILABLE"):
        return "; is the model loaded? `make models` builds the samples, `make serve` says what failed"
    return ""
