"""HTTP, blocking: tritonclient.http with a deadline of its own for each call."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import gevent
import gevent.monkey
import tritonclient.http
from geventhttpclient.response import HTTPParseError
from tritonclient.utils import InferenceServerException

from client import urls
from client.calls import DEFAULT_DEADLINE_S, Deadline, Retry
from client.errors import (
    ClientError,
    WrongOwner,
    connection_lost,
    deadline_exceeded,
    from_triton,
    unreachable,
)
from client.sync import SyncClient

T = TypeVar("T")

# What only connecting raises; other errors of the network may come after the request was sent.
_BEFORE_SENDING = (ConnectionRefusedError, socket.gaierror, ssl.SSLCertVerificationError)

# The thread's own id, also where gevent's monkey patching makes threading.get_ident() the greenlet's.
_thread_id = gevent.monkey.get_original("_thread", "get_ident")


class HttpClient(SyncClient):
    """`HttpClient("127.0.0.1:8000")`. Belongs to the thread that made it; greenlets of that thread may share it.

    `connections` is how many requests of such greenlets may be under way at once. Any other thread gets WrongOwner:
    tritonclient's HTTP client stands on gevent, which cannot cross threads. Make a client a thread, or use GrpcClient.
    """

    module = tritonclient.http

    def __init__(
        self,
        url: str,
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
        retry: Retry | None = None,
        headers: Mapping[str, str] | None = None,
        connections: int = 1,
        **triton_options: Any,
    ) -> None:
        """`triton_options` (ssl_options, ssl_context_factory, insecure, ...) go to tritonclient as they are."""
        super().__init__(urls.parse(url, "http"), deadline_s, retry, headers)
        self._triton_options = {"concurrency": connections, **triton_options}
        self._thread_id = _thread_id()
        self._triton: Any = None

    @property
    def triton(self) -> Any:
        if self._triton is None:
            self._triton = tritonclient.http.InferenceServerClient(
                self._address.host_port,
                ssl=self._address.has_tls,
                connection_timeout=None,  # the deadline of each call covers both
                network_timeout=None,
                **self._triton_options,
            )
        return self._triton

    def close(self) -> None:
        self._is_closed = True
        triton, self._triton = self._triton, None
        if triton is not None:
            triton.close()

    def _check_usable(self) -> None:
        super()._check_usable()
        here = _thread_id()
        if here != self._thread_id:
            raise WrongOwner(
                f"{self.url}: this HttpClient belongs to thread {self._thread_id} and was used in thread {here}; "
                "make one in each thread, or use GrpcClient, which threads may share"
            )

    def _attempt(self, attempt: Callable[[float | None], T], deadline: Deadline) -> T:
        remaining_s = deadline.remaining_s()
        timeout = gevent.Timeout(remaining_s)
        failure: ClientError
        try:
            with timeout:
                return attempt(remaining_s)
        except InferenceServerException as error:
            failure = from_triton(error, self.url, deadline.seconds)
        except BaseException as error:  # what was cut off in the middle leaves no connection that can be used again
            self._triton = None  # the next call opens a new one; this one closes with its last user
            if error is timeout:
                error.__traceback__ = None  # its frames would keep the cut-off connection open
                failure = deadline_exceeded(self.url, deadline.seconds)
            elif isinstance(error, (OSError, HTTPParseError)):
                failure = self._connection_error(error)
            else:
                raise
        raise failure from None

    def _connection_error(self, error: Exception) -> ClientError:
        if isinstance(error, _BEFORE_SENDING):
            return unreachable(self.url, error)
        return connection_lost(self.url, error)

    def options(self, remaining_s: float | None) -> dict[str, Any]:
        return {"headers": dict(self._headers)} if self._headers else {}

    @staticmethod
    def _sleep(seconds: float) -> None:
        gevent.sleep(seconds)
