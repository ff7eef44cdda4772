from ortgraph.backend import TritonPythonModel

__all__ = ["TritonPythonModel"]
