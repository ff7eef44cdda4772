"""What `ortgraph add` and `ortgraph convert` make, behind the real server: plain onnxruntime's answers over HTTP."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from typer.testing import CliRunner

from ortgraph.cli import app
from ortgraph.server import TritonServer
from tests import real_models as real
from tests import toys
from tests.real_models import Feed, image, plain, tokens
from tests.server.wire import Answer, infer, infer_together, metrics, total, wait_until

NAMES = (
    "minilm",
    "detection",
    "recognition",
    "classification",
    "vad",
    "vad_fixed",
    "magika",
    "int4",
    "table",
    "lengths",
    "external",
)
ROUNDS = 20  # a quick model may answer each request before the next has come
RNG = np.random.default_rng(11)


@dataclass(frozen=True)
class Case:
    """A model as it was added: its file, what `add` must have decided, and requests to ask."""

    file: Path
    max_batch_size: int
    feeds: list[Feed]
    arguments: tuple[str, ...] = ()
    tolerance: float = 1e-4


def lengths() -> onnx.ModelProto:
    """y = x * l, one number a row: `l` is [batch], for which Triton's clients send [batch, 1]."""
    nodes = [helper.make_node("Unsqueeze", ["l", "one"], ["c"]), helper.make_node("Mul", ["x", "c"], ["y"])]
    inputs = [("x", toys.F32, ["batch", "n"]), ("l", toys.F32, ["batch"])]
    return toys.model(nodes, inputs, [("y", toys.F32, ["batch", "n"])], {"one": np.array([1])})


def cases(folder: Path) -> dict[str, Case]:
    int4, large = folder / "int4.onnx", folder / "large.onnx"
    onnx.save(toys.encoder(), folder / "table.onnx")
    onnx.save(lengths(), folder / "lengths.onnx")
    onnx.save(real.int4_encoder(), int4)
    onnx.save(real.int4_encoder(), large, save_as_external_data=True, location="large.bin")
    state = RNG.uniform(-1, 1, (2, 1, 128)).astype(np.float32)
    sound = RNG.uniform(-1, 1, (1, 576)).astype(np.float32)
    vocabulary = real.SMALL_ENCODER.vocab
    return {
        "minilm": Case(real.minilm(), 32, [tokens(1, 7, 30522, 1), tokens(2, 33, 30522, 2), tokens(1, 300, 30522, 3)]),
        "detection": Case(real.path(real.DETECTION), 32, [image(1, 64, 96, 1), image(2, 96, 32, 2)]),
        "recognition": Case(real.path(real.RECOGNITION), 32, [image(1, 48, 100, 1), image(3, 48, 64, 2)]),
        "classification": Case(real.path(real.CLASSIFICATION), 32, [image(2, 48, 192, 1)]),
        "vad": Case(real.path(real.VAD), 0, [{"input": sound, "state": state, "sr": np.array([16000])}]),
        "vad_fixed": Case(real.path(real.VAD_FIXED), 0, [{"input": sound, "state": state}]),
        "magika": Case(
            real.magika(),
            32,
            [{"bytes": RNG.integers(0, 257, (rows, 2048)).astype(np.int32)} for rows in (1, 2)],
            ("--value-ranges", "bytes=0..256"),
        ),
        "int4": Case(int4, 32, [tokens(1, 5, vocabulary, 1), tokens(3, 20, vocabulary, 2)]),
        "table": Case(folder / "table.onnx", 32, [{"ids": np.array([[1, 49]]), "mask": np.array([[1, 1]])}]),
        "lengths": Case(folder / "lengths.onnx", 32, [{"x": sound.reshape(2, 288), "l": state[0, 0, :2, None]}]),
        "external": Case(large, 32, [tokens(2, 9, vocabulary, 3)]),
    }


def run(*arguments: str) -> dict[str, object]:
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, object] = json.loads(done.stdout)
    return found


def to_onnxruntime_backend(repository: Path) -> Path:
    """A directory as Triton's onnxruntime backend serves it, with settings of every kind."""
    folder = repository / "reader"
    for version in ("1", "3"):
        (folder / version).mkdir(parents=True)
        shutil.copy(real.path(real.RECOGNITION), folder / version / "reader.bin")
    (folder / "config.pbtxt").write_text(
        """
        name: "reader" platform: "onnxruntime_onnx" max_batch_size: 8 default_model_filename: "reader.bin"
        version_policy { all { } }
        input [ { name: "x" data_type: TYPE_FP32 dims: [ 3, 48, -1 ] } ]
        output [ { name: "softmax_11.tmp_0" data_type: TYPE_FP32 dims: [ -1, 6625 ] } ]
        instance_group [ { count: 1 kind: KIND_CPU } ]
        dynamic_batching { preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 500 }
        optimization { graph { level: 1 } execution_accelerators {
            gpu_execution_accelerator: [ { name: "tensorrt" parameters { key: "precision_mode" value: "FP16" } } ]
            cpu_execution_accelerator: [ { name: "openvino" } ] } }
        parameters { key: "intra_op_thread_count" value: { string_value: "1" } }
        parameters { key: "memory.enable_memory_arena_shrinkage" value: { string_value: "cpu:0" } }
        parameters { key: "cudnn_conv_algo_search" value: { string_value: "1" } }
        model_warmup [ { name: "line" batch_size: 1 inputs { key: "x" value {
            data_type: TYPE_FP32 dims: [ 3, 48, 64 ] zero_data: true } } } ]
        """
    )
    return folder


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return cases(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def server(added: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("toolbox") / "models"
    for name, case in added.items():
        said = run("add", str(case.file), "-m", str(repository), "--name", name, *case.arguments)
        limit = f"max_batch_size: {case.max_batch_size}"
        assert (limit in str(said["config"])) is (case.max_batch_size > 0), said
    run("convert", str(to_onnxruntime_backend(tmp_path_factory.mktemp("theirs"))), str(repository / "reader"))
    with TritonServer(repository, log_path=repository.parent / "triton.log") as server:
        assert [(model.name, model.reason) for model in server.models() if model.state != "READY"] == []
        yield server


def assert_close(got: Answer, wanted: Feed, tolerance: float) -> None:
    assert got.keys() == wanted.keys()
    for name, right in wanted.items():
        shape = right.shape or (1,)
        assert (got[name].shape, got[name].dtype) == (shape, right.dtype), name
        np.testing.assert_allclose(got[name], right.reshape(shape), rtol=tolerance, atol=tolerance, err_msg=name)


def answer_of(case: Case, feed: Feed) -> Feed:
    """Plain onnxruntime takes a scalar where Triton has one element, and a number a row where Triton has [rows, 1]."""
    shapes = {"sr": (), "l": (-1,)}
    return plain(case.file, {name: array.reshape(shapes.get(name, array.shape)) for name, array in feed.items()})


@pytest.mark.parametrize("name", NAMES)
def test_an_added_model_answers_as_plain_onnxruntime(server: TritonServer, added: dict[str, Case], name: str) -> None:
    case = added[name]
    for feed in case.feeds:
        assert_close(infer(server, "http", name, feed), answer_of(case, feed), case.tolerance)


@pytest.mark.parametrize("name", ["minilm", "int4", "detection", "magika"])
def test_requests_of_an_added_model_that_meet(server: TritonServer, added: dict[str, Case], name: str) -> None:
    """Twelve at once, of different sizes, until some shared a run: each gets its own answer."""
    case = added[name]
    feeds = [case.feeds[place % len(case.feeds)] for place in range(12)]
    wanted = [answer_of(case, feed) for feed in feeds]

    def counted(series: str) -> float:
        return total(metrics(server), f"nv_inference_{series}", model=name)

    requests, runs = counted("request_success"), counted("exec_count")
    for sent in range(12, 12 * ROUNDS + 1, 12):
        answers = infer_together([partial(infer, server, "http", name, feed) for feed in feeds])
        for got, right in zip(answers, wanted, strict=True):
            if isinstance(got, Exception):
                raise got
            assert_close(got, right, case.tolerance)
        # Triton counts a request after it has answered it.
        wait_until(lambda sent=sent: counted("request_success") == requests + sent, "every request counted")
        if counted("exec_count") < runs + sent:
            return
    pytest.fail(f"{sent} requests, a dozen at a time, made as many runs: none were joined")


def test_an_id_outside_the_table_is_refused(server: TritonServer) -> None:
    """`add` found the rows of the embedding table: on a GPU such an id would read foreign memory."""
    with pytest.raises(Exception, match=r"values outside 0\.\.49"):
        infer(server, "http", "table", {"ids": np.array([[50]]), "mask": np.array([[1]])})


def test_a_converted_model_answers_as_before_in_every_version(server: TritonServer) -> None:
    states = {model.version for model in server.models() if model.name == "reader"}
    assert states == {"1", "3"}
    for feed in (image(1, 48, 320, 4), image(3, 48, 64, 5)):
        assert_close(infer(server, "http", "reader", feed), plain(real.path(real.RECOGNITION), feed), 1e-4)
