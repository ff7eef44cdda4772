"""A bad model or config never takes the server down: it is unavailable, with one line that says what to change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
import tritonclient.grpc as grpc_client
from onnx import TensorProto, helper
from tritonclient.utils import InferenceServerException

from ortgraph.server import TritonServer
from tests.server.repository import ONE_LINE, graph, parameter, tensor, write
from tests.server.wire import PROTOCOLS, infer
from tests.server.zoo import DOUBLED

FIXED = "(float[4, n] x) => (float[4, n] y) { y = Add(x, x) }"
BATCHED = ONE_LINE + "max_batch_size: 8\n"
IO = tensor("input", "x", "FP32", [-1]) + tensor("output", "y", "FP32", [-1])


@dataclass(frozen=True)
class Case:
    """A model that cannot be served, and what its one line must say: the cause, and what to change."""

    model: onnx.ModelProto | bytes | None
    config: str
    cause: str
    remedy: str


def with_external_data() -> bytes:
    """A model whose weights lie in a file that is not there."""
    model = graph("(float[batch, n] x) => (float[batch, n] y) <float[1] w = {2}> { y = Mul(x, w) }")
    weight = model.graph.initializer[0]
    weight.ClearField("float_data")
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="weights.bin")
    return bytes(model.SerializeToString())


def with_optional_output() -> onnx.ModelProto:
    """`y` may hold a tensor or nothing."""
    kind = helper.make_optional_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, ["n"]))
    node = helper.make_node("Optional", ["x"], ["y"])
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])
    made = helper.make_graph([node], "tested", [x], [helper.make_value_info("y", kind)])
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def cases() -> dict[str, Case]:
    double, whole = graph(DOUBLED), graph(DOUBLED).SerializeToString()
    fp8 = graph("(float8e4m3fn[batch, n] x) => (float8e4m3fn[batch, n] y) { y = Identity(x) }")
    int4 = graph("(int4[batch, n] x) => (float[batch, n] y) <float s = {1}> { y = DequantizeLinear(x, s) }")
    sequence = graph("(float[n] x) => (seq(float[n]) y) { y = SequenceConstruct(x, x) }")
    unknown_op = graph("(float[batch, n] x) => (float[batch, n] y) { y = NoSuchOperator(x) }")

    def wrong(key: str, value: str) -> str:
        return BATCHED + IO + parameter(key, value)

    return {
        # The file
        "file_missing": Case(None, ONE_LINE, "model.onnx is missing", "put the ONNX model there"),
        "file_garbage": Case(b"no model", ONE_LINE, "cannot load model.onnx", "copy it again"),
        "file_empty": Case(b"", ONE_LINE, "cannot load model.onnx", "copy it again"),
        "file_truncated": Case(whole[: len(whole) // 2], ONE_LINE, "cannot load model.onnx", "copy it again"),
        "opset_too_new": Case(graph(DOUBLED, opset=99), ONE_LINE, "opset", "older opset"),
        "ir_too_new": Case(graph(DOUBLED, ir_version=99), ONE_LINE, "IR version", "older IR version"),
        "weights_missing": Case(with_external_data(), ONE_LINE, "weights.bin", "external data file beside model.onnx"),
        "operator_unknown": Case(unknown_op, ONE_LINE, "NoSuchOperator", "custom library or a newer onnxruntime"),
        # Types that Triton or ONNX Runtime cannot carry
        "type_sequence": Case(sequence, ONE_LINE, "'y' is seq(tensor(float))", "only tensors"),
        "type_optional": Case(with_optional_output(), ONE_LINE, "'y' is optional(tensor(float))", "only tensors"),
        "type_fp8": Case(fp8, ONE_LINE, "'x' is float8e4m3fn, which Triton cannot carry", "cast it"),
        "type_int4": Case(int4, ONE_LINE, "int4", "only tensors"),
        # config.pbtxt and the model
        "input_misspelt": Case(double, BATCHED + IO.replace('"x"', '"xx"'), "input 'xx' is not in the model", "'x'"),
        "input_left_out": Case(
            graph("(float[batch, n] x, float[batch, n] z) => (float[batch, n] y) { y = Add(x, z) }"),
            BATCHED + IO,
            "input 'z' is not in config.pbtxt",
            "add it",
        ),
        "dtype_differs": Case(double, BATCHED + IO.replace("FP32", "INT32"), "TYPE_INT32", "set TYPE_FP32"),
        "dims_differ": Case(double, BATCHED + IO.replace("[-1]", "[-1, 3]"), "dims are [-1, 3]", "the model has [-1]"),
        "batch_fixed": Case(graph(FIXED), BATCHED + IO, "fixed size 4 on its first axis", "max_batch_size: 0"),
        "batch_of_scalar": Case(
            graph("(float x) => (float y) { y = Add(x, x) }"),
            BATCHED + IO.replace("[-1]", "[1]"),
            "is a scalar and has no batch axis",
            "max_batch_size: 0",
        ),
        # Parameters
        "parameter_unknown": Case(double, wrong("bucket", "batch=1"), "unknown parameter 'bucket'", "'buckets'"),
        "buckets_unknown": Case(double, wrong("buckets", "bach=1,2"), "no dynamic dimension 'bach'", "'batch'"),
        "buckets_zero": Case(double, wrong("buckets", "batch=0"), "'buckets' must be", "got 'batch=0'"),
        "buckets_twice": Case(double, wrong("buckets", "n=1; n=2"), "'buckets' must be", "no name twice"),
        "pad_unknown": Case(double, wrong("pad_values", "z=1"), "'pad_values'", "no input 'z'"),
        "range_reversed": Case(double, wrong("value_ranges", "x=2..1"), "'value_ranges' must be", "low not above high"),
        "provider_unknown": Case(double, wrong("execution_provider", "tpu"), "'execution_provider'", "one of auto"),
        "threads_negative": Case(double, wrong("intra_op_thread_count", "-1"), "'intra_op_thread_count'", "from 0"),
        # Features that cannot be combined
        "decoupled": Case(
            double, BATCHED + IO + "model_transaction_policy { decoupled: true }\n", "decoupled", "remove it"
        ),
    }


CASES = cases()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """Every bad model, and between them a good one."""
    repository: Path = tmp_path_factory.mktemp("failures") / "models"
    for name, case in CASES.items():
        write(repository, name, case.model, case.config)
    write(repository, "good", graph(DOUBLED))
    with TritonServer(repository, log_path=repository.parent / "triton.log") as started:
        yield started


@pytest.mark.parametrize("name", CASES)
def test_one_line_says_what_to_change(server: TritonServer, name: str) -> None:
    (model,) = (model for model in server.models() if model.name == name)
    assert model.state == "UNAVAILABLE"
    assert "\n" not in model.reason
    assert model.reason.startswith(f"{name}: ")
    assert "Traceback" not in model.reason
    assert CASES[name].cause in model.reason
    assert CASES[name].remedy in model.reason


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_good_model_serves_beside_them(server: TritonServer, protocol: str) -> None:
    assert [model.name for model in server.models() if model.state == "READY"] == ["good"]
    x = np.array([[1.0, 2.5]], np.float32)
    assert infer(server, protocol, "good", {"x": x})["y"].tolist() == [[2.0, 5.0]]


def test_a_bad_config_pushed_later_leaves_the_old_version_serving(explicit_server: TritonServer) -> None:
    x = np.array([[1.0, 2.5]], np.float32)
    folder = write(explicit_server.repository, "pushed", graph(DOUBLED))
    with grpc_client.InferenceServerClient(explicit_server.grpc_url) as client:
        client.load_model("pushed")
        (folder / "config.pbtxt").write_text(ONE_LINE + parameter("bucket", "batch=1"))
        with pytest.raises(
            InferenceServerException, match="pushed: unknown parameter 'bucket'; did you mean 'buckets'"
        ):
            client.load_model("pushed")
        assert infer(explicit_server, "grpc", "pushed", {"x": x})["y"].tolist() == [[2.0, 5.0]]
        (folder / "config.pbtxt").write_text(ONE_LINE + parameter("buckets", "batch=1"))
        client.load_model("pushed")
    assert infer(explicit_server, "grpc", "pushed", {"x": x})["y"].tolist() == [[2.0, 5.0]]
