"""The small models that the server tests share: one repository, one server for the whole session."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.server.repository import ONE_LINE, TYPES, echo, graph, parameter, tensor, write

# Held until 8 rows have come: requests of strangers meet in one batch however slow the machine is.
EIGHT_ROWS = "max_batch_size: 8\ndynamic_batching { max_queue_delay_microseconds: 60000000 }\n"
RAGGED = "allow_ragged_batch: true"
SLOW_STEPS = 2_000_000
TABLE = np.arange(100, 110, dtype=np.float32)

# Two outputs, so that one is a row of its own and one has the request's length; values come out in float64 exactness.
MASKED = """(float[batch, length] x, float[batch, length] mask) => (float[batch] mean, float[batch, length] weighted)
<int64[1] last = {1}> {
    weighted = Mul(x, mask)
    sums = ReduceSum<keepdims = 0>(weighted, last)
    counts = ReduceSum<keepdims = 0>(mask, last)
    mean = Div(sums, counts)
}"""
MASKED_IO = (
    tensor("input", "x", "FP32", [-1], RAGGED)
    + tensor("input", "mask", "FP32", [-1], RAGGED)
    + tensor("output", "mean", "FP32", [1])
    + tensor("output", "weighted", "FP32", [-1])
)
DOUBLED = "(float[batch, n] x) => (float[batch, n] y) { y = Add(x, x) }"
MAXIMUM = """(float[batch, length] x) => (float[batch, 1] y) <int64[1] last = {1}> { y = ReduceMax(x, last) }"""
MAXIMUM_IO = tensor("input", "x", "FP32", [-1], RAGGED) + tensor("output", "y", "FP32", [1])
LOOKUP = """(int64[batch, n] ids) => (float[batch, n] y)
<float[10] table = {100, 101, 102, 103, 104, 105, 106, 107, 108, 109}> { y = Gather(table, ids) }"""
# One initializer that a request may override, one input that the config fills in when it is absent.
OPTIONAL = """(float[batch, n] x, float[batch, n] scale, float[batch, m] bias) => (float[batch, n] y)
<float[1, 1] bias = {0.5}> {
    scaled = Mul(x, scale)
    y = Add(scaled, bias)
}"""
# As silero-vad: the batch is axis 0 of `x`, axis 1 of `state`, and the names do not say so.
STATES = """(float[rows, n] x, float[2, streams, 4] state) => (float[rows, n] y, float[2, streams, 4] next) {
    y = Add(x, x)
    next = Neg(state)
}"""
SCALARS = """(float x, int64[2] k) => (float y, int64[2] m) { y = Add(x, x) m = Add(k, k) }"""
SLOW = """(int64[1] steps, float[batch] x) => (float[batch] y) <bool keep = {1}, float zero = {0.0}> {
    count = Squeeze(steps)
    y = Loop(count, keep, x) <body = step (int64 i, bool go, float[batch] a) => (bool on, float[batch] b) {
        on = Identity(go)
        b = Neg(a)
    }>
}"""


def write_zoo(repository: Path) -> None:
    """Write every model of the zoo."""
    every_type = echo(TYPES, "batch, n")
    write(repository, "types", every_type)
    write(repository, "types_python", every_type, 'backend: "python"\n', has_model_py=True)
    write(repository, "types_of_four", every_type, ONE_LINE + "max_batch_size: 4\n")
    write(repository, "types_unbatched", echo(TYPES, "rows, columns"))
    write(repository, "numbers", graph("(float[batch] x) => (float[batch] y) { y = Add(x, x) }"))
    write(repository, "strings", echo({"BYTES": "string"}, "batch, n"))
    write(repository, "scalars", graph(SCALARS))
    write(repository, "states", graph(STATES), ONE_LINE + parameter("buckets", "state[1]=2,4; x[0]=4,16"))
    write(repository, "masked", graph(MASKED), ONE_LINE + "max_batch_size: 32\ndynamic_batching { }\n" + MASKED_IO)
    write(repository, "together", graph(MASKED), ONE_LINE + EIGHT_ROWS + MASKED_IO)
    write(repository, "counted", graph(MASKED), ONE_LINE + EIGHT_ROWS + MASKED_IO + parameter("buckets", "batch=1,8"))
    write(
        repository,
        "maximum",
        graph(MAXIMUM),
        ONE_LINE + EIGHT_ROWS + MAXIMUM_IO + parameter("pad_values", "x=-1e30"),
    )
    write(repository, "maximum_never_padded", graph(MAXIMUM), ONE_LINE + EIGHT_ROWS + MAXIMUM_IO)
    write(repository, "lookup", graph(LOOKUP), ONE_LINE + EIGHT_ROWS)
    write(
        repository,
        "optional",
        graph(OPTIONAL),
        ONE_LINE
        + "max_batch_size: 8\ndynamic_batching { }\n"
        + tensor("input", "x", "FP32", [-1])
        + tensor("input", "scale", "FP32", [-1], "optional: true")
        + tensor("input", "bias", "FP32", [-1], "optional: true")
        + tensor("output", "y", "FP32", [-1])
        + parameter("default_values", "scale=3"),
    )
    write(repository, "slow", graph(SLOW))
    write(
        repository,
        "static",
        graph(MASKED),
        ONE_LINE + "max_batch_size: 8\n" + MASKED_IO + parameter("buckets", "batch=8; length=16"),
    )
    write(
        repository,
        "tuned",
        graph(DOUBLED),
        ONE_LINE
        + "max_batch_size: 8\n"
        + tensor("input", "x", "FP32", [-1])
        + tensor("output", "y", "FP32", [-1])
        + parameter("FORCE_CPU_ONLY_INPUT_TENSORS", "no")
        + parameter("intra_op_thread_count", "1")
        + parameter("session.intra_op.allow_spinning", "0")
        + 'model_warmup [ { name: "two" batch_size: 2 inputs { key: "x" value: '
        + "{ data_type: TYPE_FP32 dims: [ 4 ] random_data: true } } } ]\n",
    )
