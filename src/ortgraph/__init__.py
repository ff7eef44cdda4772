"""ortgraph: serve ONNX models on NVIDIA Triton with batches of different lengths and shape buckets."""

from .config import ModelConfig, parse
from .engine import Engine
from .errors import ConfigError, LoadError, ModelError, OrtgraphError, RequestError

__all__ = ["ConfigError", "Engine", "LoadError", "ModelConfig", "ModelError", "OrtgraphError", "RequestError", "parse"]
__version__ = "0.1.0"
