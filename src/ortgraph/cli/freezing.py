"""Inputs and sizes made constant, and the branches that are decided by them replaced by the branch that is taken."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, numpy_helper
from onnx.reference import ReferenceEvaluator

from ..dtypes import DType
from ..errors import nearest
from ..providers.base import Array
from ..signature import TensorSpec
from .files import CommandError

_CONTROL_FLOW = ("If", "Loop", "Scan")
_RANDOM = ("Bernoulli", "Dropout", "Multinomial", "RandomNormalLike", "RandomUniformLike")
_AXIS = re.compile(r"(.+)\[(\d+)\]")


@dataclass(frozen=True)
class Frozen:
    """What --freeze names: the value of an input, the size of an input's axis."""

    values: dict[str, Array] = field(default_factory=dict)
    sizes: dict[tuple[str, int], int] = field(default_factory=dict)


def parse_freeze(texts: Sequence[str], inputs: Sequence[TensorSpec]) -> Frozen:
    """`sr=16000` is the value of an input, `x[1]=576` the size of its axis, `batch=1` that of a named dimension.

    Raises:
        CommandError: an unknown name, a value that the input cannot take, a size that the model fixes otherwise.
    """
    frozen = Frozen()
    specs = {spec.name: spec for spec in inputs}
    for text in texts:
        name, equals, value = (part.strip() for part in text.rpartition("="))
        if not equals or not name or not value:
            raise CommandError(f"--freeze must be NAME=VALUE, INPUT[AXIS]=SIZE or DIMENSION=SIZE, got '{text}'")
        if name in specs:
            frozen.values[name] = _value(specs[name], value)
            continue
        axes = _axes(name, inputs)
        if not axes:
            known = {*specs, *(size for spec in inputs for size in spec.shape if isinstance(size, str))}
            raise CommandError(f"--freeze: the model has no input or dimension '{name}'{nearest(name, known)}")
        if not re.fullmatch(r"\d{1,9}", value) or int(value) < 1:
            raise CommandError(f"--freeze {name}: a size is a whole number from 1, got '{value}'")
        for input_name, axis in axes:
            fixed = specs[input_name].shape[axis]
            if isinstance(fixed, int) and fixed != int(value):
                raise CommandError(f"--freeze {name}={value}: that axis has the size {fixed} in the model")
            frozen.sizes[input_name, axis] = int(value)
    return frozen


def _axes(name: str, inputs: Sequence[TensorSpec]) -> list[tuple[str, int]]:
    if match := _AXIS.fullmatch(name):
        axis = int(match[2])
        return [(spec.name, axis) for spec in inputs if spec.name == match[1] and axis < len(spec.shape)]
    return [(spec.name, axis) for spec in inputs for axis, size in enumerate(spec.shape) if size == name]


def _value(spec: TensorSpec, text: str) -> Array:
    """An array of the input's shape filled with one value."""
    if not all(isinstance(size, int) for size in spec.shape):
        raise CommandError(f"--freeze {spec.name}: only an input of fixed sizes can be frozen, this has {_shown(spec)}")
    return np.full([int(size or 0) for size in spec.shape], _scalar(spec.name, spec.dtype, text), spec.dtype.storage)


def _scalar(name: str, dtype: DType, text: str) -> Any:
    rule = {"i": "a whole number", "u": "a whole number", "f": "a number", "b": "true, false, 1 or 0"}
    kind = dtype.storage.kind
    try:
        if dtype.is_raw or kind not in rule:
            raise CommandError(f"--freeze {name}: inputs of type {dtype.onnx_name} cannot be frozen")
        if kind == "b":
            return {"true": True, "false": False, "1": True, "0": False}[text.lower()]
        if kind == "f":
            return float(text)
        number, limits = int(text), np.iinfo(dtype.storage)
        if not limits.min <= number <= limits.max:
            raise ValueError
        return number
    except (ValueError, KeyError):
        raise CommandError(f"--freeze {name}: {dtype.onnx_name} takes {rule[kind]}, got '{text}'") from None


def _shown(spec: TensorSpec) -> str:
    return "[" + ", ".join(str(size if size is not None else "?") for size in spec.shape) + "]"


def freeze(model: ModelProto, frozen: Frozen) -> None:
    """Turn inputs into constants and fix sizes of the others, in place; then fold what they decide."""
    graph = model.graph
    for name, array in frozen.values.items():
        graph.input.remove(next(tensor for tensor in graph.input if tensor.name == name))
        for old in [tensor for tensor in graph.initializer if tensor.name == name]:
            graph.initializer.remove(old)  # a default value
        graph.initializer.append(numpy_helper.from_array(array, name))
    for (name, axis), size in frozen.sizes.items():
        tensor = next(tensor for tensor in graph.input if tensor.name == name)
        tensor.type.tensor_type.shape.dim[axis].dim_value = size
    while _fold_branches(model):
        pass


def _fold_branches(model: ModelProto) -> bool:
    """Replace each If of the main graph whose condition is known; False when there was none."""
    graph = model.graph
    if not any(node.op_type == "If" for node in graph.node):
        return False
    known = _Known(model)
    nodes: list[NodeProto] = []
    for node in graph.node:
        condition = known.value(node.input[0]) if node.op_type == "If" else None
        if condition is None:
            nodes.append(node)
            continue
        taken = "then_branch" if bool(np.asarray(condition).all()) else "else_branch"
        branch = next(attribute.g for attribute in node.attribute if attribute.name == taken)
        nodes += _inlined(node, branch, graph)
    is_changed = len(nodes) != len(graph.node) or any(a is not b for a, b in zip(nodes, graph.node, strict=True))
    if is_changed:
        kept = [_copy(node) for node in nodes]
        del graph.node[:]
        graph.node.extend(kept)
    return is_changed


def _copy(node: NodeProto) -> NodeProto:
    copy = NodeProto()
    copy.CopyFrom(node)
    return copy


def _inlined(node: NodeProto, branch: GraphProto, graph: GraphProto) -> list[NodeProto]:
    """The branch's nodes under names of their own, its weights moved to the graph, its outputs under the If's names."""
    prefix = f"{node.name or node.output[0]}/"
    own = [*(tensor.name for tensor in branch.initializer), *(out for inner in branch.node for out in inner.output)]
    names = {name: prefix + name for name in own if name}
    for weight in branch.initializer:
        graph.initializer.add().CopyFrom(weight)
        graph.initializer[-1].name = names[weight.name]
    nodes = []
    for inner in branch.node:
        copy = _copy(inner)
        copy.name = prefix + inner.name if inner.name else ""
        _rename(copy, names)
        nodes.append(copy)
    for given, wanted in zip(branch.output, node.output, strict=True):
        if wanted:
            nodes.append(onnx.helper.make_node("Identity", [names.get(given.name, given.name)], [wanted]))
    return nodes


def _rename(node: NodeProto, names: Mapping[str, str]) -> None:
    """Rename the tensors of a node and of its subgraphs, which may read those around them."""
    node.input[:] = [names.get(name, name) for name in node.input]
    node.output[:] = [names.get(name, name) for name in node.output]
    for graph in subgraphs(node):
        for inner in graph.node:
            _rename(inner, names)
        for output in graph.output:
            output.name = names.get(output.name, output.name)


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """The branches or bodies of a node."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


class _Known:
    """Values of the main graph's tensors that depend on no input's values, only on constants and known sizes."""

    def __init__(self, model: ModelProto) -> None:
        self._constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self._producers = {name: node for node in model.graph.node for name in node.output if name}
        self._opsets = {opset.domain: opset.version for opset in model.opset_import}
        self._values: dict[str, Array | None] = {}
        self._sizes = _inferred_sizes(model)

    def value(self, name: str) -> Array | None:
        """The value of a tensor, or None where it is not known."""
        if name not in self._values:
            self._values[name] = None  # graphs have no cycles; this is for the damaged ones
            self._values[name] = self._find(name)
        return self._values[name]

    def _find(self, name: str) -> Array | None:
        if name in self._constants:
            return np.asarray(numpy_helper.to_array(self._constants[name]))
        node = self._producers.get(name)
        if node is None or node.domain not in ("", "ai.onnx") or node.op_type in (*_CONTROL_FLOW, *_RANDOM):
            return None
        if node.op_type == "Shape":
            sizes = self._shape(node)
            return None if sizes is None or None in sizes else np.array(sizes, np.int64)
        if node.op_type == "Gather" and (size := self._gathered_size(node)) is not None:
            return size
        given = {source: self.value(source) for source in node.input if source}
        if any(value is None for value in given.values()) or (not given and node.op_type != "Constant"):
            return None
        try:
            found = ReferenceEvaluator(node, opsets=self._opsets).run(None, given)
        except Exception:  # an operator or type that ONNX's reference lacks
            return None
        return np.asarray(found[list(node.output).index(name)])

    def _shape(self, node: NodeProto) -> list[int | None] | None:
        sizes = self._sizes.get(node.input[0])
        ends = {attribute.name: attribute.i for attribute in node.attribute}
        return None if sizes is None else sizes[ends.get("start", 0) : ends.get("end", len(sizes))]

    def _gathered_size(self, node: NodeProto) -> Array | None:
        """One size of a shape of which others are not known."""
        shape, index = self._producers.get(node.input[0]), self.value(node.input[1])
        if shape is None or shape.op_type != "Shape" or index is None:
            return None
        sizes = self._shape(shape)
        if sizes is None or not all(-len(sizes) <= place < len(sizes) for place in index.flat):
            return None
        found = [sizes[place] for place in index.flat]
        return None if None in found else np.array(found, np.int64).reshape(index.shape)


def _inferred_sizes(model: ModelProto) -> dict[str, list[int | None]]:
    """The sizes of each tensor's axes as far as ONNX's shape inference knows them."""
    try:
        graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    except Exception:  # a graph that it cannot handle, or over 2 GB: then the sizes that the inputs declare
        graph = model.graph
    return {
        tensor.name: [dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.type.tensor_type.shape.dim]
        for tensor in (*graph.input, *graph.value_info, *graph.output)
        if tensor.type.tensor_type.HasField("shape")
    }


def control_flow(model: ModelProto) -> str:
    """One sentence on the first node of the main graph that still branches or loops and on what decides it, or ''."""
    nodes = [node for node in model.graph.node if node.op_type in _CONTROL_FLOW]
    if not nodes:
        return ""
    node = nodes[0]
    more = f" (and {len(nodes) - 1} more)" if len(nodes) > 1 else ""
    found = f"{node.op_type} '{node.name or node.output[0]}'{more} remains: it depends on"
    causes = sorted(_causes(model, node.input[:1] if node.op_type == "If" else node.input))
    if not causes:
        return f"{found} nothing that could be frozen"
    values = [name for name, is_size in causes if not is_size]
    sizes = [name for name, is_size in causes if is_size and name not in values]
    parts = [f"the values of {_listed(values)}"] * bool(values) + [f"the sizes of {_listed(sizes)}"] * bool(sizes)
    open_axes = [
        f"--freeze '{tensor.name}[{axis}]=SIZE'"
        for tensor in model.graph.input
        for axis, dim in enumerate(tensor.type.tensor_type.shape.dim)
        if tensor.name in sizes and not dim.dim_value
    ]
    hint = f"; {' '.join(open_axes)} may remove it" if open_axes and not values else ""
    return f"{found} {' and '.join(parts)}{hint}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _causes(model: ModelProto, tensors: Iterable[str]) -> set[tuple[str, bool]]:
    """The inputs on which tensors depend; True for those of which only the sizes count."""
    producers = {name: node for node in model.graph.node for name in node.output if name}
    inputs = {tensor.name for tensor in model.graph.input} - {tensor.name for tensor in model.graph.initializer}
    waiting = [(name, False) for name in tensors]
    seen: set[tuple[str, bool]] = set()
    while waiting:
        name, is_size = found = waiting.pop()
        if found in seen:
            continue
        seen.add(found)
        if name in producers:
            is_inner = is_size or producers[name].op_type in ("Shape", "Size")
            waiting += [(source, is_inner) for source in producers[name].input if source]
    return {found for found in seen if found[0] in inputs}
