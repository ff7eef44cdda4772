"""`ortgraph serve`: the real server on a model repository, until Ctrl-C."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from ..server import ROOT, ModelState, ServerError, TritonServer
from .console import console, errors, fail

Repository = Annotated[Path, typer.Option("--model-repository", "-m", help="The model repository.")]
HttpPort = Annotated[int, typer.Option(help="0 takes a free one.")]
GrpcPort = Annotated[int, typer.Option(help="0 takes a free one.")]
MetricsPort = Annotated[int, typer.Option(help="0 takes a free one.")]
Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 opens the server to the network.")]
Log = Annotated[Path | None, typer.Option(help="Where the server's log goes.")]


def serve(
    model_repository: Repository = ROOT / "model_repository",
    host: Host = "127.0.0.1",
    http_port: HttpPort = 8000,
    grpc_port: GrpcPort = 8001,
    metrics_port: MetricsPort = 8002,
    log: Log = None,
) -> None:
    """Serve a model repository until Ctrl-C. Example: ortgraph serve -m model_repository --http-port 9000"""
    server = TritonServer(
        model_repository,
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        log_path=log,
    )
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    try:
        with console.status("Starting Triton") as status:
            server.start(on_progress=lambda models: _progress(status.update, models, stop))
        _announce(server)
        while not stop.wait(0.5):
            server.check_alive()
    except _Interrupted:
        pass
    except ServerError as error:
        fail(str(error))
    finally:
        with console.status("Stopping"):
            server.stop()
    console.print("Stopped.")


class _Interrupted(Exception):
    """Ctrl-C while models were loading."""


def _progress(update: object, models: list[ModelState], stop: threading.Event) -> None:
    if stop.is_set():
        raise _Interrupted
    loading = [model.name for model in models if model.state not in ("READY", "UNAVAILABLE")]
    if callable(update):
        update(f"Loading {', '.join(loading) or 'models'}")


def _announce(server: TritonServer) -> None:
    models = server.models()
    for model in models:
        if model.state == "READY":
            console.print(f"[green]READY[/green]   {model.name} version {model.version}")
        else:
            errors.print(f"[red]FAILED[/red]  {model.name}: ", end="")
            errors.print(model.reason or "no version could be loaded", markup=False)
    if not models:
        errors.print(f"no model in {server.repository}", style="yellow", markup=False)
    console.print(f"HTTP     http://{server.http_url}")
    console.print(f"gRPC     {server.grpc_url}")
    console.print(f"metrics  {server.metrics_url}")
    console.print(f"log      {server.log_path}")
    console.print("Ctrl-C stops the server.")
