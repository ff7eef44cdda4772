"""`python -m examples.demo`: serve the sample models, ask them over HTTP and gRPC, load them with Locust, stop.

Every answer is compared with a known one. The exit code is 1 when any was wrong.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from client import AsyncGrpcClient, AsyncHttpClient, ClientError, GrpcClient, HttpClient
from client.command import BadFile
from client.embed import embed, load_tokenizer, similarity_table
from client.read import Reading, load_labels, load_line, read_line
from client.tensors import Array
from ortgraph.server import ModelState, ServerError, TritonServer

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = ROOT / "client" / "samples"
SENTENCES = (
    "a cat sits on the mat",
    "a cat is sitting on a rug",
    "stock prices fell sharply today",
    "markets closed lower after a volatile session on Wall Street",
)
# Cosine similarities of a float64 forward pass of the same weights, by the sentences' places.
KNOWN_SIMILARITIES = {(0, 1): 0.7828, (0, 2): 0.0698}
SIMILARITY_TOLERANCE = 2e-3
# A GPU may compute with TF32.
PROTOCOL_TOLERANCE = 1e-2
KNOWN_TEXTS = {"hello.png": "Hello Triton 2026", "invoice.png": "Invoice No. 4711, total 99.50"}

console = Console(highlight=False, soft_wrap=True)
Port = Annotated[int, typer.Option(help="0 takes a free one.")]


class WrongAnswerError(Exception):
    """The server gave an answer that is known to be wrong, or a model is not ready."""


def main(
    duration_s: Annotated[float, typer.Option(min=0.5, help="Seconds of the load test.")] = 10.0,
    users: Annotated[int, typer.Option(min=1, help="Locust users.")] = 8,
    http_port: Port = 0,
    grpc_port: Port = 0,
    metrics_port: Port = 0,
) -> None:
    """Show everything once, in less than a minute."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    server = TritonServer(
        ROOT / "model_repository", http_port=http_port, grpc_port=grpc_port, metrics_port=metrics_port
    )
    try:
        try:
            start(server)
            show_similarities(server)
            show_texts(server)
            show_load(server, duration_s, users)
        finally:
            with console.status("Stopping the server"):
                server.stop()
    except (WrongAnswerError, ServerError, ClientError, BadFile) as error:
        console.print(f"error: {error}", style="bold red", markup=False)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        console.print("Interrupted; the server is stopped.")
        raise typer.Exit(130) from None
    console.print("All answers were right. The server is stopped.")


def start(server: TritonServer) -> None:
    """Start the server and wait for its models. Raises WrongAnswerError when one is not ready."""
    start_s = time.perf_counter()
    with console.status("Starting Triton") as status:

        def tell(models: list[ModelState]) -> None:
            loading = [model.name for model in models if model.state not in ("READY", "UNAVAILABLE")]
            status.update(f"Loading {', '.join(loading) or 'models'}")

        server.start(on_progress=tell)
    console.print(f"Triton is ready after {time.perf_counter() - start_s:.1f} s: HTTP {server.http_url}, ", end="")
    console.print(f"gRPC {server.grpc_url}, metrics {server.metrics_url}")
    for model in server.models():
        if model.state != "READY":
            raise WrongAnswerError(f"model {model.name} is {model.state}: {model.reason}")


def show_similarities(server: TritonServer) -> None:
    """Embed the sentences over HTTP and gRPC, one request a sentence, all at once."""
    tokenizer = load_tokenizer()

    async def ask() -> tuple[Array, Array]:
        async with AsyncHttpClient(server.http_url) as http, AsyncGrpcClient(server.grpc_url) as grpc:
            return await embed(http, tokenizer, SENTENCES), await embed(grpc, tokenizer, SENTENCES)

    over_http, over_grpc = asyncio.run(ask())
    console.print(f"\n[bold]text_embedding[/bold]: {len(SENTENCES)} sentences over HTTP, and again over gRPC")
    console.print(similarity_table(SENTENCES, over_http))
    error = float(np.abs(over_http - over_grpc).max())
    if not error <= PROTOCOL_TOLERANCE:
        raise WrongAnswerError(f"HTTP and gRPC must give the same embeddings, but differ by {error:.1e}")
    for (left, right), expected in KNOWN_SIMILARITIES.items():
        got = float(over_http[left] @ over_http[right])
        if not abs(got - expected) <= SIMILARITY_TOLERANCE:
            raise WrongAnswerError(
                f"'{SENTENCES[left]}' and '{SENTENCES[right]}' must score {expected:.4f}, got {got:.4f}"
            )


def show_texts(server: TritonServer) -> None:
    """Read the sample images, over HTTP and gRPC."""
    console.print("\n[bold]text_recognition[/bold]: the text on an image, over HTTP and gRPC")
    labels = load_labels()
    with HttpClient(server.http_url) as http, GrpcClient(server.grpc_url) as grpc:
        for name, expected in KNOWN_TEXTS.items():
            line = load_line(SAMPLES / name)
            readings = [read_line(client, line, labels) for client in (http, grpc)]
            console.print(f"  client/samples/{name}: {readings[0].text.strip()}  ({readings[0].confidence:.1%} sure)")
            _check_texts(name, expected, readings)


def _check_texts(name: str, expected: str, readings: Sequence[Reading]) -> None:
    for reading in readings:  # a blank before the text is a close call in the model itself
        if reading.text.strip() != expected:
            raise WrongAnswerError(f"{name} must read '{expected}', got '{reading.text}'")


def show_load(server: TritonServer, duration_s: float, users: int) -> None:
    """Locust in a process of its own; it prints its table. Raises WrongAnswerError when an answer was wrong."""
    console.print(f"\n[bold]load test[/bold]: {users} Locust users, {duration_s:g} s, lengths 8 to 128")
    options = {
        "--url": server.http_url,
        "--metrics-url": server.metrics_url,
        "--duration-s": duration_s,
        "--users": users,
    }
    command = [sys.executable, "-m", "loadtest", *(str(word) for option in options.items() for word in option)]
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise WrongAnswerError("the load test had failures; they are listed above")


if __name__ == "__main__":
    typer.run(main)
