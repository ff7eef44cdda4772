"""What can be read from an ONNX graph: which nodes forbid a captured graph, which inputs are indices, its weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import onnx
from onnx import TensorProto, helper

_CONTROL_FLOW = frozenset({"If", "Loop", "Scan", "SequenceMap"})
_SEQUENCES = frozenset(
    {"SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength"}
    | {"SplitToSequence", "ConcatFromSequence", "Optional", "OptionalGetElement", "OptionalHasElement"}
)
_STRINGS = frozenset({"StringNormalizer", "StringConcat", "StringSplit", "RegexFullMatch", "TfIdfVectorizer"})
_DATA_SIZED = frozenset({"NonZero", "Unique", "Compress", "NonMaxSuppression"})
_CLASSICAL = "ai.onnx.ml"
_SHAPES = frozenset({"Shape", "Size"})
_PASS_ON = frozenset({"Cast", "Identity", "DequantizeLinear"})
# The contrib encoder embedding: place of the ids among its inputs -> place of their table.
_EMBEDDINGS = {"EmbedLayerNormalization": {0: 2, 1: 4}}
_GATHERS = frozenset({"Gather", "GatherBlockQuantized"})


@dataclass(frozen=True)
class Obstacle:
    """Nodes of one kind that forbid capture on these providers: why, and what to do about it."""

    nodes: tuple[str, ...]
    reason: str
    providers: tuple[str, ...]
    mend: str


@dataclass(frozen=True)
class Weights:
    """The initializers of one element type: how many and their bytes."""

    dtype: str
    count: int
    size_bytes: int


def nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Every node of a graph and of the graphs inside its nodes."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (*attribute.graphs, *((attribute.g,) if attribute.HasField("g") else ())):
                yield from nodes(inner)


def shown(node: onnx.NodeProto) -> str:
    """How a node is called in messages: by its name, else by what it makes."""
    name = node.name or next((f"the one that makes '{output}'" for output in node.output if output), "without a name")
    return f"{node.op_type} {name}"


def obstacles(model: onnx.ModelProto) -> list[Obstacle]:
    """What in the graph forbids capture, without having run it; an empty list is no promise."""
    both = ("cuda", "webgpu")
    ml_nodes = [node for node in nodes(model.graph) if node.domain == _CLASSICAL]
    kinds = (
        (_CONTROL_FLOW, "control flow", both, _mend_control_flow(model)),
        (_SEQUENCES, "sequences and optionals live on the host", both, "export with tensors instead of sequences"),
        (_STRINGS, "strings live on the host", both, "move the text operators into the client, and serve the rest"),
        (_DATA_SIZED, "the size of its output depends on values, so the host must wait for it", both,
         "move it into the client, or export with a fixed number of results"),
        (_SHAPES, "a size is computed on the host", ("webgpu",),
         "none needed: a bucket of fixed sizes folds it away; each bucket then has a session of its own"),
    )  # fmt: skip
    found = []
    for operators, reason, providers, mend in kinds:
        names = tuple(
            shown(node) for node in nodes(model.graph) if node.op_type in operators and node.domain != _CLASSICAL
        )
        if names:
            found.append(Obstacle(names, reason, providers, mend))
    constants = {weight.name for weight in model.graph.initializer}
    constants |= {node.output[0] for node in nodes(model.graph) if node.op_type == "Constant"}
    fixed = [node for node in nodes(model.graph) if node.op_type == "GatherND" and node.input[1] in constants]
    if fixed:
        reason = "with constant indices its CUDA kernel copies from the host, which can end a capture and the process"
        mend = "replace it by Slice, Gather or Reshape"
        found.append(Obstacle(tuple(map(shown, fixed)), reason, ("cuda",), mend))
    if ml_nodes:
        mend = "move the classical part into the client or a model of its own"
        found.append(Obstacle(tuple(map(shown, ml_nodes)), "only the CPU has this operator", both, mend))
    texts = [
        value.name for value in (*model.graph.input, *model.graph.output) if _elem_type(value) == TensorProto.STRING
    ]
    if texts:
        mend = "tokenize in the client"
        found.append(Obstacle(tuple(f"tensor {name}" for name in texts), "strings live on the host", both, mend))
    return found


def _mend_control_flow(model: onnx.ModelProto) -> str:
    """A condition that hangs on a scalar input alone can be fixed; else the export must be another."""
    weights = {weight.name for weight in model.graph.initializer}
    scalars = [
        value.name
        for value in model.graph.input
        if value.name not in weights and value.type.HasField("tensor_type") and not value.type.tensor_type.shape.dim
    ]
    if scalars:
        return f"make the scalar input '{scalars[0]}' a constant if the condition hangs on it; else export without it"
    return "export without it (trace instead of script, or unroll the loop)"


def _elem_type(value: onnx.ValueInfoProto) -> int:
    return int(value.type.tensor_type.elem_type)


def index_ranges(model: onnx.ModelProto) -> dict[str, tuple[int, int]]:
    """The inputs that are nothing but indices into the rows of a weight, and the range 0..rows - 1 of each.

    Outside of it ONNX Runtime fails on the CPU and reads foreign memory on a GPU.
    """
    rows = {weight.name: weight.dims[0] for weight in model.graph.initializer if weight.dims}
    sources = {value.name: value.name for value in model.graph.input if value.name not in rows}
    found: dict[str, int] = {}
    for node in model.graph.node:
        if node.op_type == "Constant" and node.attribute[0].t.dims:
            rows[node.output[0]] = node.attribute[0].t.dims[0]
        if node.op_type in _PASS_ON and node.input and node.output:
            for known in (rows, sources):
                if node.input[0] in known:
                    known[node.output[0]] = known[node.input[0]]
        for indices, table in _indices_of(node):
            if indices in sources and table in rows:
                source = sources[indices]
                found[source] = min(found.get(source, rows[table]), rows[table])
    return {name: (0, count - 1) for name, count in found.items() if count > 0}


def _indices_of(node: onnx.NodeProto) -> list[tuple[str, str]]:
    """(indices, table) pairs of a node that looks rows up."""
    if node.op_type in _GATHERS and len(node.input) > 1:
        axis = next((attribute.i for attribute in node.attribute if attribute.name in ("axis", "gather_axis")), 0)
        return [(node.input[1], node.input[0])] if axis == 0 else []
    places = _EMBEDDINGS.get(node.op_type, {})
    return [(node.input[i], node.input[table]) for i, table in places.items() if len(node.input) > table]


def weights(model: onnx.ModelProto) -> list[Weights]:
    """The model's weights by element type, the largest first; external data is counted without being read."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in onnx.external_data_helper._get_all_tensors(model):
        dtype = TensorProto.DataType.Name(tensor.data_type)
        counts[dtype] += 1
        sizes[dtype] += _size_bytes(tensor)
    return [Weights(dtype, counts[dtype], size) for dtype, size in sizes.most_common()]


def _size_bytes(tensor: onnx.TensorProto) -> int:
    elements = math.prod(int(size) for size in tensor.dims)
    if tensor.data_type == TensorProto.STRING:
        return sum(map(len, tensor.string_data))
    if tensor.data_type in (TensorProto.INT4, TensorProto.UINT4, TensorProto.FLOAT4E2M1):
        return (elements + 1) // 2
    item_bytes: int = helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    return elements * item_bytes


def quantised(model: onnx.ModelProto) -> list[str]:
    """One line for each kind of quantised part."""
    found = Counter()  # type: ignore[var-annotated]
    for node in nodes(model.graph):
        attributes = {attribute.name: attribute.i for attribute in node.attribute}
        if node.op_type in ("MatMulNBits", "GatherBlockQuantized"):
            block = attributes.get("block_size", 128)
            found[f"{node.op_type}: {attributes.get('bits', 4)}-bit weights, blocks of {block}"] += 1
        elif node.op_type in ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"):
            found[f"{node.op_type} ({_quantised_type(model, node)})"] += 1
        elif node.op_type.startswith(
            ("QLinear", "QGemm", "QAttention", "MatMulInteger", "ConvInteger", "DynamicQuantizeM")
        ):
            found[node.op_type] += 1
    return [f"{what}: {count} nodes" for what, count in sorted(found.items())]


def _quantised_type(model: onnx.ModelProto, node: onnx.NodeProto) -> str:
    """The element type of a QDQ node's zero point or weight, where the graph says it."""
    by_name = {weight.name: weight for weight in model.graph.initializer}
    for name in (*node.input[2:3], *node.input[:1]):
        if name in by_name and not (node.op_type == "QuantizeLinear" and name == node.input[0]):
            return str(TensorProto.DataType.Name(by_name[name].data_type)).lower()
    return "uint8"
