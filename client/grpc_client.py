"""gRPC, blocking: tritonclient.grpc, whose own time-out also cancels the request on the server."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from client import urls
from client.calls import DEFAULT_DEADLINE_S, Deadline, Retry
from client.errors import from_triton
from client.sync import SyncClient

T = TypeVar("T")
_MAX_INT32 = 2**31 - 1

# tritonclient's own channel arguments, and a reconnection that keeps pace with Retry (gRPC's own waits 1 to 120 s).
CHANNEL_ARGS = (
    ("grpc.max_send_message_length", _MAX_INT32),
    ("grpc.max_receive_message_length", _MAX_INT32),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
)


class GrpcClient(SyncClient):
    """`GrpcClient("127.0.0.1:8001")`. Threads may share it.

    Under gevent call `grpc.experimental.gevent.init_gevent()` before the first client is made.
    """

    module = tritonclient.grpc

    def __init__(
        self,
        url: str,
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
        retry: Retry | None = None,
        headers: Mapping[str, str] | None = None,
        **triton_options: Any,
    ) -> None:
        """`triton_options` (root_certificates, creds, channel_args, ...) go to tritonclient as they are."""
        super().__init__(urls.parse(url, "grpc"), deadline_s, retry, headers)
        options = {"channel_args": list(CHANNEL_ARGS), **triton_options}
        self._triton = tritonclient.grpc.InferenceServerClient(
            self._address.host_port, ssl=self._address.has_tls, **options
        )

    @property
    def triton(self) -> Any:
        return self._triton

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._triton.close()

    def _attempt(self, attempt: Callable[[float | None], T], deadline: Deadline) -> T:
        try:
            return attempt(deadline.remaining_s())
        except InferenceServerException as error:
            failure = from_triton(error, self.url, deadline.seconds)
        raise failure from None

    def options(self, remaining_s: float | None) -> dict[str, Any]:
        headers = {"headers": dict(self._headers)} if self._headers else {}
        return {"client_timeout": remaining_s, **headers}

    def _json_options(self) -> dict[str, Any]:
        return {"as_json": True}

    @staticmethod
    def _sleep(seconds: float) -> None:
        time.sleep(seconds)
