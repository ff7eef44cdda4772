"""Triton's Python-based backend `ortgraph`: serves every model whose config says `backend: "ortgraph"`."""

from ortgraph.backend import TritonPythonModel

__all__ = ["TritonPythonModel"]
