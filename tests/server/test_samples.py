"""The sample models behind the real server answer what plain onnxruntime, alone, answers on the same input."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tokenizers import Tokenizer
from tritonclient.utils import InferenceServerException, shared_memory

from ortgraph.server import TritonServer
from tests.server.reference import RECOGNIZED, REPOSITORY, Array, assert_same, line_image, plain, token_rows
from tests.server.wire import PROTOCOLS, Answer, infer, infer_together, metrics, to_wire, total, wait_until

both_protocols = pytest.mark.parametrize("protocol", PROTOCOLS)
EMBEDDING, RECOGNITION = "text_embedding", "text_recognition"
# Bucket sizes, one less, one more, and longer than the largest bucket.
LENGTHS = (1, 2, 15, 16, 17, 64, 65, 256, 257, 300)


@both_protocols
@pytest.mark.parametrize("length", LENGTHS)
def test_embeddings_of_every_length(sample_server: TritonServer, protocol: str, length: int) -> None:
    sent = token_rows(2, length, length)
    assert_same(infer(sample_server, protocol, EMBEDDING, sent), plain(EMBEDDING, sent))


@both_protocols
@pytest.mark.parametrize("rows", [1, 3, 31, 32])
def test_embeddings_of_every_batch_size(sample_server: TritonServer, protocol: str, rows: int) -> None:
    sent = token_rows(rows, 12, rows)
    got = infer(sample_server, protocol, EMBEDDING, sent)
    assert_same(got, plain(EMBEDDING, sent))
    np.testing.assert_allclose(np.linalg.norm(got["embedding"], axis=1), 1, atol=1e-5)


@both_protocols
@pytest.mark.parametrize(("rows", "width"), [(1, 320), (3, 320), (8, 48), (1, 333), (2, 640)])
def test_recognition_of_every_width(sample_server: TritonServer, protocol: str, rows: int, width: int) -> None:
    """Widths without a bucket run at their exact size: this model's answers depend on the width."""
    sent = line_image(rows, width, width)
    got = infer(sample_server, protocol, RECOGNITION, sent)
    assert_same(got, plain(RECOGNITION, sent))
    np.testing.assert_allclose(got[RECOGNIZED].sum(-1), 1, atol=1e-4)


@pytest.mark.parametrize("model", [EMBEDDING, RECOGNITION])
def test_strangers_at_once(sample_server: TritonServer, model: str) -> None:
    """Sixteen clients with rows, lengths and widths of their own, several times: some meet in a batch."""
    before = metrics(sample_server)
    if model == EMBEDDING:
        sent = [token_rows(1 + i % 3, 1 + (i * 7) % 60, 100 + i) for i in range(16)]
    else:
        sent = [line_image(1 + i % 2, (320, 320, 64, 200)[i % 4], 100 + i) for i in range(16)]
    wanted = [plain(model, inputs) for inputs in sent]
    rounds = 4
    for _ in range(rounds):
        calls = [partial(infer, sample_server, PROTOCOLS[i % 2], model, inputs) for i, inputs in enumerate(sent)]
        for got, right in zip(infer_together(calls), wanted, strict=True):
            if isinstance(got, Exception):
                raise got
            assert_same(got, right)
    after = metrics(sample_server)
    requests, executions = (
        total(after, name, model=model) - total(before, name, model=model)
        for name in ("nv_inference_request_success", "nv_inference_exec_count")
    )
    assert requests == 16 * rounds
    assert executions < requests


@both_protocols
@pytest.mark.parametrize(
    ("model", "output", "make"),
    [(EMBEDDING, "embedding", partial(token_rows, 3, 21)), (RECOGNITION, RECOGNIZED, partial(line_image, 2, 320))],
)
def test_through_system_shared_memory(
    sample_server: TritonServer, protocol: str, model: str, output: str, make: Callable[[int], dict[str, Array]]
) -> None:
    """Inputs and the output each lie in one region that client and server map."""
    sent = make(7)
    wanted = plain(model, sent)
    answer = infer_in_shared_memory(sample_server, protocol, model, sent, output, wanted[output])
    assert_same(answer, wanted)


def infer_in_shared_memory(
    server: TritonServer, protocol: str, model: str, sent: dict[str, Array], output: str, like: Array
) -> Answer:
    module: Any = http_client if protocol == "http" else grpc_client
    url = server.http_url if protocol == "http" else server.grpc_url
    key = uuid.uuid4().hex
    sizes = [array.nbytes for array in sent.values()]
    up = shared_memory.create_shared_memory_region(f"{key}_in", f"/{key}_in", sum(sizes))
    down = shared_memory.create_shared_memory_region(f"{key}_out", f"/{key}_out", like.nbytes)
    with module.InferenceServerClient(url) as client:
        try:
            client.register_system_shared_memory(f"{key}_in", f"/{key}_in", sum(sizes))
            client.register_system_shared_memory(f"{key}_out", f"/{key}_out", like.nbytes)
            shared_memory.set_shared_memory_region(up, list(sent.values()))
            tensors = to_wire(module, sent)
            for place, tensor in enumerate(tensors):
                tensor.set_shared_memory(f"{key}_in", sizes[place], sum(sizes[:place]))
            wanted = module.InferRequestedOutput(output)
            wanted.set_shared_memory(f"{key}_out", like.nbytes)
            described = client.infer(model, tensors, outputs=[wanted]).get_output(output)
            shape = described["shape"] if protocol == "http" else described.shape
            assert tuple(shape) == like.shape
            return {output: shared_memory.get_contents_as_numpy(down, like.dtype, like.shape).copy()}
        finally:
            for name in (f"{key}_in", f"{key}_out"):
                wait_until(partial(is_unregistered, client, name), f"{name} was let go")
            shared_memory.destroy_shared_memory_region(up)
            shared_memory.destroy_shared_memory_region(down)


def is_unregistered(client: Any, region: str) -> bool:
    """Triton may still hold a region for a moment after it has sent the answer."""
    try:
        client.unregister_system_shared_memory(region)
    except InferenceServerException as error:
        if "currently in use" not in error.message():
            raise
        return False
    return True


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    loaded: Tokenizer = Tokenizer.from_file(str(REPOSITORY / EMBEDDING / "tokenizer.json"))
    loaded.no_padding()
    return loaded


def embed_apart(server: TritonServer, tokenizer: Tokenizer, texts: list[str]) -> Array:
    """Each text in a request of its own, all at once."""
    calls = []
    for text in texts:
        ids = np.array([tokenizer.encode(text).ids])
        calls.append(partial(infer, server, "grpc", EMBEDDING, {"input_ids": ids, "attention_mask": ids * 0 + 1}))
    return np.concatenate([answer["embedding"] for answer in infer_together(calls)])


def test_known_pairs_of_sentences_rank_right(sample_server: TritonServer, tokenizer: Tokenizer) -> None:
    """The two numbers come from a float64 forward pass of the same weights."""
    cat, rug, stock = embed_apart(
        sample_server,
        tokenizer,
        ["a cat sits on the mat", "a cat is sitting on a rug", "stock prices fell sharply today"],
    )
    assert cat @ rug == pytest.approx(0.7828, abs=1e-3)
    assert cat @ stock == pytest.approx(0.0698, abs=1e-3)


@pytest.mark.parametrize(
    ("query", "near", "far"),
    [
        ("How do I reset my password?", "I forgot my login credentials", "The soup needs more salt"),
        ("The train leaves at noon", "Departure of the railway service is 12 o'clock", "Bananas are rich in potassium"),
        ("He bought a new car", "She purchased a vehicle", "The committee rejected the proposal"),
        ("heavy rain tomorrow", "The forecast says it will pour", "A proof by induction on the length"),
    ],
)
def test_what_means_the_same_is_nearer(
    sample_server: TritonServer, tokenizer: Tokenizer, query: str, near: str, far: str
) -> None:
    a, b, c = embed_apart(sample_server, tokenizer, [query, near, far])
    assert a @ b > a @ c + 0.1


def test_an_answer_does_not_depend_on_who_else_asks(sample_server: TritonServer) -> None:
    """The same request again and again, alone and between longer ones."""
    sent = token_rows(1, 9, 3)
    alone = infer(sample_server, "grpc", EMBEDDING, sent)
    is_over = threading.Event()

    def noise(seed: int) -> None:
        while not is_over.is_set():
            infer(sample_server, "http", EMBEDDING, token_rows(2, 40 + seed, seed))

    threads = [threading.Thread(target=noise, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            assert_same(infer(sample_server, "grpc", EMBEDDING, sent), alone)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
