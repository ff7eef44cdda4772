"""A small writer of ONNX graphs: add nodes and constants, get tensor names back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
IR_VERSION = 8
CONTRIB_DOMAIN = "com.microsoft"


class GraphWriter:
    """Collects nodes in the order they are added, which is the order they can run in."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, TensorProto] = {}
        self._domains = {""}

    def constant(self, name: str, value: Any, dtype: Any = None) -> str:
        """Store `value` as the initializer `name`. The same name twice keeps the first one."""
        if name not in self._initializers:
            array = np.ascontiguousarray(np.asarray(value, dtype=dtype)).reshape(np.shape(value))
            self._initializers[name] = numpy_helper.from_array(array, name)
        return name

    def add(self, op_type: str, *inputs: str, name: str, domain: str = "", **attributes: Any) -> str:
        """Add a node whose output is called like the node. An empty input name leaves an optional input out."""
        self._domains.add(domain)
        self._nodes.append(helper.make_node(op_type, inputs, [name], name=name, domain=domain, **attributes))
        return name

    def model(
        self,
        name: str,
        inputs: Sequence[onnx.ValueInfoProto],
        outputs: Sequence[onnx.ValueInfoProto],
    ) -> onnx.ModelProto:
        """The finished model, checked by ONNX where it knows the operators."""
        graph = helper.make_graph(self._nodes, name, inputs, outputs, list(self._initializers.values()))
        versions = {"": OPSET, CONTRIB_DOMAIN: 1}
        opsets = [helper.make_opsetid(domain, versions[domain]) for domain in sorted(self._domains)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="ortgraph.models")
        onnx.checker.check_model(model)
        return model
