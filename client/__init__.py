"""Clients for models on Triton, with the habits of tritonclient's users; tritonclient does the work underneath.

with HttpClient("127.0.0.1:8000") as client:
    answer = client.infer("text_embedding", {"input_ids": ids, "attention_mask": mask}, deadline_s=2.0)["embedding"]
"""

from __future__ import annotations

from typing import Any

from client.aio import AsyncGrpcClient, AsyncHttpClient
from client.calls import Retry
from client.cuda_memory import CudaMemory
from client.errors import (
    ClientClosed,
    ClientError,
    ConnectionLost,
    DeadlineExceeded,
    InvalidInput,
    ServerRefused,
    SharedMemoryError,
    Unreachable,
    WrongOwner,
)
from client.grpc_client import GrpcClient
from client.http_client import HttpClient
from client.metadata import ModelMetadata, TensorMetadata
from client.shared_memory import SharedRegion

__all__ = [
    "AsyncGrpcClient",
    "AsyncHttpClient",
    "ClientClosed",
    "ClientError",
    "ConnectionLost",
    "CudaMemory",
    "DeadlineExceeded",
    "GrpcClient",
    "HttpClient",
    "InvalidInput",
    "ModelMetadata",
    "Retry",
    "ServerRefused",
    "SharedMemoryError",
    "SharedRegion",
    "TensorMetadata",
    "Unreachable",
    "WrongOwner",
    "connect",
]


def connect(url: str, **options: Any) -> HttpClient | GrpcClient:
    """A client for `http://host:port`, `https://...`, `grpc://host:port` or `grpcs://...`."""
    scheme = url.partition("://")[0]
    if scheme in ("http", "https"):
        return HttpClient(url, **options)
    if scheme in ("grpc", "grpcs"):
        return GrpcClient(url, **options)
    raise InvalidInput(f"url must start with http://, https://, grpc:// or grpcs://, got {url!r}")
