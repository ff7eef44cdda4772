"""Two hundred requests that break a rule, made the same way each time. Each is one edit of a good request."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2

PATH = "/v2/models/text_embedding/infer"
METHOD = "/inference.GRPCInferenceService/ModelInfer"
ROWS, LENGTH = 1, 4
TYPES = (
    *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "FP16", "FP32", "FP64", "BF16", "BYTES"),
    *("", "FP8", "int64", "TYPE_INT64", "x" * 1000),
)
NAMES = ("", "Input_ids", "input_ids ", "输入", "attention_mask", "x" * 4_000, "../input_ids")
# More or fewer elements than were sent, another number of axes, no size at all.
SHAPES: tuple[list[int], ...] = (
    *([], [4], [1, 4, 1], [1, 1, 1, 4], [2, 4], [1, 5], [1, 3], [4, 1], [0, 4]),
    *([1, -4], [-1, -4], [-1, 4], [-4, -1], [2**32, 2**32], [2**62, 4], [2**31, 2**31, 2**31]),
)
# Two things Triton 24.10 itself does not survive, whatever the model, so they are not among these requests: a shape of
# 2**31 elements or more as JSON data (the server makes room for what it was promised before it looks for it, and ends;
# server PR 8174 mended that in 2025), and a shape whose number of bytes is right only modulo 2**64, such as
# [1, 2**61 + 4] for 4 elements of 8 bytes (the Python backend's process ends before it calls the model). With tensors
# as bytes, as every client library sends them, all other sizes are compared first.
HUGE_SHAPES: tuple[list[int], ...] = ([1, 2**31], [1, 2**32 + 4], [1, 2**62], [1, 2**63 - 1])
VALUES = (30_522, 2**31, 2**63 - 1, -1, -(2**63))  # outside the vocabulary of 30522 ids


@dataclass(frozen=True)
class HttpRequest:
    """What goes over the socket."""

    name: str
    body: bytes
    path: str = PATH
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class GrpcRequest:
    """What goes through the channel, already serialized."""

    name: str
    body: bytes
    method: str = METHOD


def good_json() -> dict[str, Any]:
    ids = {"name": "input_ids", "shape": [ROWS, LENGTH], "datatype": "INT64", "data": [101, 4937, 2003, 102]}
    mask = {"name": "attention_mask", "shape": [ROWS, LENGTH], "datatype": "INT64", "data": [1] * LENGTH}
    return {"inputs": [ids, mask]}


def good_message() -> Any:
    request = service_pb2.ModelInferRequest(model_name="text_embedding")
    for name, row in (("input_ids", [101, 4937, 2003, 102]), ("attention_mask", [1] * LENGTH)):
        request.inputs.add(name=name, datatype="INT64", shape=[ROWS, LENGTH])
        request.raw_input_contents.append(np.array(row, np.int64).tobytes())
    return request


def http_requests() -> Iterator[HttpRequest]:
    yield from _http_tensors()
    yield from _http_structure()
    yield from _http_bodies()
    yield from _http_binary()
    yield from _http_addresses()


def _json(name: str, edited: Any) -> HttpRequest:
    return HttpRequest(name, json.dumps(edited).encode())


def _edited(name: str, key: str, value: Any, place: int = 0) -> HttpRequest:
    """One key of one input set to another value."""
    request = good_json()
    request["inputs"][place][key] = value
    return _json(f"{name} {str(value)[:40]!r}", request)


def _http_tensors() -> Iterator[HttpRequest]:
    for name in (*NAMES, None, 5, ["input_ids"]):
        yield _edited("name", "name", name)
    for datatype in (*TYPES, None, 7):
        yield _edited("datatype", "datatype", datatype)
    for shape in (*SHAPES, [1, 2**63], [1, 4.5], ["1", "4"], None, 4, {}):
        yield _edited("shape", "shape", shape)
    for value in VALUES:
        yield _edited("ids", "data", [101, value, 2003, 102])
    for value in (2, -1, 2**62):
        yield _edited("mask", "data", [1, 1, value, 1], place=1)
    for data in ([], [1], [1] * 5, [[1, 2], [3]], [1.5] * 4, ["a"] * 4, [None] * 4, "abcd", None, {}, 7, [2**64] * 4):
        yield _edited("data", "data", data)


def _http_structure() -> Iterator[HttpRequest]:
    whole = good_json()
    ids, mask = whole["inputs"]
    for name, inputs in (
        ("no mask", [ids]),
        ("no ids", [mask]),
        ("ids twice", [ids, mask, ids]),
        ("one too many", [ids, mask, {**ids, "name": "token_type_ids"}]),
        ("no inputs", []),
        ("inputs null", None),
        ("inputs text", "input_ids"),
        ("inputs of numbers", [1, 2]),
        ("an input without name", [{k: v for k, v in ids.items() if k != "name"}, mask]),
        ("an input without data", [{k: v for k, v in ids.items() if k != "data"}, mask]),
        ("an input without shape", [{k: v for k, v in ids.items() if k != "shape"}, mask]),
        ("an input without datatype", [{k: v for k, v in ids.items() if k != "datatype"}, mask]),
        ("a region nobody registered", [{**ids, "parameters": {"shared_memory_region": "none"}}, mask]),
    ):
        yield _json(name, {"inputs": inputs})
    for outputs in ([{"name": "embeddings"}], [{"name": ""}], [{}], [{"name": 5}], ["embedding"], [None]):
        yield _json(f"outputs {outputs}", {**whole, "outputs": outputs})
    yield _json(
        "an output's region nobody registered",
        {**whole, "outputs": [{"name": "embedding", "parameters": {"shared_memory_region": "none"}}]},
    )
    yield _json("nothing", {})
    yield _json("a list", [whole])
    yield _json("a text", "infer")


def _http_bodies() -> Iterator[HttpRequest]:
    good = json.dumps(good_json()).encode()
    for cut in range(1, len(good), len(good) // 12):
        yield HttpRequest(f"cut after {cut} bytes", good[:cut])
    yield HttpRequest("empty", b"")
    yield HttpRequest("zero bytes", bytes(64))
    yield HttpRequest("no UTF-8", good.replace(b"input_ids", b"\xff\xfe\xfd"))
    yield HttpRequest("deep", b"[" * 5_000)
    yield HttpRequest("NaN as a number", good.replace(b"4937", b"NaN"))
    yield HttpRequest("1e999", good.replace(b"4937", b"1e999"))
    yield HttpRequest("not gzip", good, headers={"Content-Encoding": "gzip"})
    yield HttpRequest("not deflate", good, headers={"Content-Encoding": "deflate"})


def _http_binary() -> Iterator[HttpRequest]:
    """The binary extension: JSON, then each tensor's bytes, their sizes in the JSON and a header."""
    size_bytes = ROWS * LENGTH * 8
    tail = np.array([[101, 4937, 2003, 102], [1, 1, 1, 1]], np.int64).tobytes()

    def request(
        name: str, sizes: tuple[Any, Any], tail: bytes, header_bytes: Any = None, shape: Any = None
    ) -> HttpRequest:
        edited = good_json()
        edited["inputs"][0]["shape"] = shape or [ROWS, LENGTH]
        for tensor, size in zip(edited["inputs"], sizes, strict=True):
            del tensor["data"]
            tensor["parameters"] = {"binary_data_size": size}
        head = json.dumps(edited).encode()
        length = len(head) if header_bytes is None else header_bytes(len(head))
        return HttpRequest(name, head + tail, headers={"Inference-Header-Content-Length": str(length)})

    right = (size_bytes, size_bytes)
    for size in (0, 1, size_bytes - 1, size_bytes + 1, size_bytes * 2, 2**31, 2**63, -1, "32", 1.5, None):
        yield request(f"binary size {size}", (size, size_bytes), tail)
    for shape in HUGE_SHAPES:
        yield request(f"binary shape {shape}", right, tail, shape=shape)
    yield request("binary size of the second", (size_bytes, size_bytes + 8), tail)
    for cut in (0, 1, size_bytes, size_bytes + 1, len(tail) - 1):
        yield request(f"binary cut at {cut}", right, tail[:cut])
    yield request("binary and 1 byte more", right, tail + b"\x00")
    yield request("binary twice", right, tail * 2)
    for label, edit in (
        ("0", lambda n: 0),
        ("-1", lambda n: -1),
        ("one less", lambda n: n - 1),
        ("one more", lambda n: n + 1),
        ("too large", lambda n: n + 10_000),
        ("huge", lambda n: 2**64),
        ("a word", lambda n: "abc"),
    ):
        yield request(f"header length {label}", right, tail, edit)


def _http_addresses() -> Iterator[HttpRequest]:
    body = json.dumps(good_json()).encode()
    for path in (
        "/v2/models/no_such_model/infer",
        "/v2/models/text_embedding/versions/9/infer",
        "/v2/models/text_embedding/versions/abc/infer",
        "/v2/models/text_embedding/versions/-1/infer",
        "/v2/models/text_embedding/versions/99999999999999999999/infer",
        "/v2/models//infer",
        "/v2/models/text_embedding/guess",
        "/v2/models/" + "x" * 2_000 + "/infer",
        "/v2/models/%00/infer",
    ):
        yield HttpRequest(f"path {path[:60]}", body, path)
    for method in ("GET", "PUT", "DELETE"):
        yield HttpRequest(f"method {method}", body, method=method)


def grpc_requests() -> Iterator[GrpcRequest]:
    def edit(name: str, change: Any) -> GrpcRequest:
        request = copy.deepcopy(good_message())
        change(request)
        return GrpcRequest(name, request.SerializeToString())

    def set_on_first(**values: Any) -> Any:
        return lambda request: [setattr(request.inputs[0], key, value) for key, value in values.items()]

    def set_shape(shape: list[int]) -> Any:
        def change(request: Any) -> None:
            del request.inputs[0].shape[:]
            request.inputs[0].shape.extend(shape)

        return change

    def set_raw(place: int, row: Any) -> Any:
        def change(request: Any) -> None:
            request.raw_input_contents[place] = row if isinstance(row, bytes) else np.array(row, np.int64).tobytes()

        return change

    for name in NAMES:
        yield edit(f"name {name[:40]!r}", set_on_first(name=name))
    for datatype in TYPES:
        yield edit(f"datatype {datatype[:40]!r}", set_on_first(datatype=datatype))
    for shape in (*SHAPES, *HUGE_SHAPES):
        yield edit(f"shape {shape}", set_shape(shape))
    for value in VALUES:
        yield edit(f"ids {value}", set_raw(0, [101, value, 2003, 102]))
    for value in (2, -1, 2**62):
        yield edit(f"mask {value}", set_raw(1, [1, 1, value, 1]))
    for size in (0, 1, 31, 33, 64):
        yield edit(f"{size} bytes", set_raw(0, bytes(size)))
    for name, change in (
        ("no raw contents", lambda r: r.ClearField("raw_input_contents")),
        ("one raw content", lambda r: r.raw_input_contents.pop()),
        ("raw and typed contents", lambda r: r.inputs[0].contents.int64_contents.extend([1, 2, 3, 4])),
        ("no inputs", lambda r: (r.ClearField("inputs"), r.ClearField("raw_input_contents"))),
        ("no mask", lambda r: (r.inputs.pop(), r.raw_input_contents.pop())),
        ("unknown output", lambda r: r.outputs.add(name="embeddings")),
        ("empty output", lambda r: r.outputs.add(name="")),
        ("no model", lambda r: setattr(r, "model_name", "")),
        ("unknown model", lambda r: setattr(r, "model_name", "no_such_model")),
        ("unknown version", lambda r: setattr(r, "model_version", "9")),
        ("version that is a word", lambda r: setattr(r, "model_version", "latest")),
        ("region nobody registered", lambda r: _use_region(r.inputs[0])),
    ):
        yield edit(name, change)
    good = good_message().SerializeToString()
    for cut in (1, len(good) // 3, len(good) // 2, len(good) - 1):
        yield GrpcRequest(f"message cut after {cut} bytes", good[:cut])
    yield GrpcRequest("no protobuf", b"\xff" * 64)
    yield GrpcRequest("empty message", b"")
    yield GrpcRequest("unknown method", good, "/inference.GRPCInferenceService/ModelGuess")


def _use_region(tensor: Any) -> None:
    tensor.parameters["shared_memory_region"].string_param = "none"
    tensor.parameters["shared_memory_byte_size"].int64_param = 32


def send_http(connection: Any, request: HttpRequest) -> tuple[int, bytes]:
    """The status and body of the answer. Connections are kept open, as a client's pool does."""
    connection.request(request.method, request.path, request.body, request.headers)
    answer = connection.getresponse()
    return answer.status, answer.read()


def send_grpc(channel: grpc.Channel, request: GrpcRequest) -> tuple[str, str]:
    """The name of the status and its text; `OK` when there was an answer."""
    call = channel.unary_unary(request.method, request_serializer=bytes, response_deserializer=bytes)
    try:
        call(request.body, timeout=60)
    except grpc.RpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""
