"""`python -m ortgraph.graph_optimiser SOURCE TARGET [DATA]`: save a model as ONNX Runtime optimises it (basic level).

In a process of its own, for ONNX Runtime can crash on a graph: 1.31 does when it inlines some nested branches.
The basic level is the one whose result runs on every provider. With DATA, weights go to that file beside TARGET.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import onnxruntime as ort

from .errors import first_line


def main(arguments: Sequence[str]) -> int:
    """The exit code; what ONNX Runtime says of a failure goes to standard error, one line."""
    source, target, *data = arguments
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = target
    for name in data:
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", name)
        options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    # Shared constants hide from the transformer optimizer what a node's own constant is.
    optional = {"disabled_optimizers": ["ConstantSharing"], "enable_fallback": 0}
    try:
        ort.InferenceSession(source, options, providers=["CPUExecutionProvider"], **optional)
    except Exception as error:
        print(first_line(error), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
