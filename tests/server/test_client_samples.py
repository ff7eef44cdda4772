"""The commands and the README's examples against the sample models."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from client import GrpcClient, HttpClient, SharedRegion
from client.embed import load_tokenizer, tokenize
from client.read import load_labels, load_line, read_line
from ortgraph.server import TritonServer

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "client" / "samples"
README = (ROOT / "client" / "README.md").read_text()
EXAMPLES = dict(re.findall(r"## (\w[\w ]+)\n.*?```python\n(.*?)```", README, re.DOTALL))
EXPECTED = {
    "HTTP": ["(1, 384)"],
    "gRPC": ["(TensorMetadata(name='x', datatype='FP32', shape=(-1, 3, 48, -1)),)", "(1, 40, 6625)"],
    "asyncio": ["[(1, 384), (1, 384), (1, 384)]"],
    "Shared memory": ["(1, 384)"],
}
SENTENCES = ("a cat sits on the mat", "a cat is sitting on a rug", "stock prices fell sharply today")


def run(server: TritonServer, *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def address(server: TritonServer, protocol: str) -> tuple[str, ...]:
    return ("--protocol", protocol, "--url", server.http_url if protocol == "http" else server.grpc_url)


@pytest.mark.parametrize("title", EXPECTED)
def test_the_readme_examples_run(sample_server: TritonServer, title: str) -> None:
    program = EXAMPLES[title].replace("127.0.0.1:8000", sample_server.http_url)
    program = program.replace("127.0.0.1:8001", sample_server.grpc_url)
    assert run(sample_server, "-c", program) == EXPECTED[title]


def test_every_readme_example_is_tested() -> None:
    assert set(EXAMPLES) == set(EXPECTED)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_embed_prints_how_alike_sentences_are(sample_server: TritonServer, protocol: str) -> None:
    """The numbers are those of a float64 forward of MiniLM-L6-v2 (0.7828 and 0.0698)."""
    lines = run(sample_server, "-m", "client.embed", *SENTENCES, *address(sample_server, protocol))
    rows = [line.replace("│", " ").split() for line in lines if line.startswith("│")]
    assert [row[-3:] for row in rows] == [
        ["1.000", "0.783", "0.070"],
        ["0.783", "1.000", "0.096"],
        ["0.070", "0.096", "1.000"],
    ]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_read_prints_the_text_of_an_image(sample_server: TritonServer, protocol: str) -> None:
    images = [str(SAMPLES / name) for name in ("hello.png", "invoice.png")]
    first, second = run(sample_server, "-m", "client.read", *images, *address(sample_server, protocol))
    assert re.fullmatch(r".*hello\.png: Hello Triton 2026  \(9\d\.\d% sure\)", first)
    assert re.fullmatch(r".*invoice\.png: Invoice No\. 4711, total 99\.50  \(9\d\.\d% sure\)", second)


def test_answers_equal_plain_onnxruntime_by_every_way(sample_server: TritonServer) -> None:
    tokens = tokenize(load_tokenizer(), SENTENCES[0])
    line = {"x": load_line(SAMPLES / "hello.png")}
    for model, inputs in (("text_embedding", tokens), ("text_recognition", line)):
        session = ort.InferenceSession(
            ROOT / "model_repository" / model / "1" / "model.onnx", providers=["CPUExecutionProvider"]
        )
        names = [output.name for output in session.get_outputs()]
        (expected,) = session.run(names, inputs)
        for client_class, url in ((HttpClient, sample_server.http_url), (GrpcClient, sample_server.grpc_url)):
            with client_class(url) as client, SharedRegion(client, byte_size=4 << 20) as region:
                room = {names[0]: expected.nbytes}
                for answer in (client.infer(model, inputs), region.infer(model, inputs, output_bytes=room)):
                    np.testing.assert_allclose(answer[names[0]], expected, rtol=1e-4, atol=1e-5)


def test_read_line_is_usable_as_a_function(sample_server: TritonServer) -> None:
    with HttpClient(sample_server.http_url) as client:
        reading = read_line(client, load_line(SAMPLES / "hello.png"), load_labels())
    assert reading.text == "Hello Triton 2026"
    assert reading.confidence > 0.9
