"""Everything the clients raise.

ClientError
  InvalidInput        a name, array or option that cannot be sent; nothing was sent
  WrongOwner          the client belongs to another thread or event loop
  ClientClosed        the client was closed
  Unreachable         no connection; nothing was sent, so a repeat is safe
  ConnectionLost      the connection broke after sending; the request may have run
  DeadlineExceeded    the deadline passed, here or in the server's queue
  ServerRefused       the server answered with an error: `status` and `message`
  SharedMemoryError   a region cannot be made, registered, filled or given back
"""

from __future__ import annotations

import os

from tritonclient.utils import InferenceServerException

# Triton's HTTP codes and the gRPC names of the same failures (http_server.cc, HttpCodeFromError; other codes are 400).
_HTTP_STATUS = {
    "400": "INVALID_ARGUMENT",
    "404": "NOT_FOUND",
    "409": "ALREADY_EXISTS",
    "499": "CANCELLED",
    "500": "INTERNAL",
    "501": "UNIMPLEMENTED",
    "503": "UNAVAILABLE",
}
# gRPC says UNAVAILABLE for its own connection failures and for the server's answers; only the text tells them apart.
_GRPC_UNREACHABLE = ("failed to connect to all addresses", "dns resolution failed", "errors resolving")
_GRPC_LOST = ("socket closed", "connection reset", "broken pipe", "goaway", "end of tcp stream", "keepalive", "recvmsg")
_QUEUE_TIMEOUT = "request timeout expired"


class ClientError(Exception):
    """Base of all errors of this library; the text is one line that says what to do."""


class InvalidInput(ClientError, ValueError):
    """A name, array or option that cannot be sent."""


class WrongOwner(ClientError, RuntimeError):
    """The client belongs to another thread or event loop."""


class ClientClosed(ClientError, RuntimeError):
    """The client was closed."""


class Unreachable(ClientError, ConnectionError):
    """No connection could be made; nothing was sent."""


class ConnectionLost(ClientError, ConnectionError):
    """The connection broke after the request was sent; it may have run."""


class DeadlineExceeded(ClientError, TimeoutError):
    """The deadline passed before the answer came."""


class ServerRefused(ClientError):
    """The server answered with an error.

    `status` is gRPC's name for it (`INVALID_ARGUMENT`, `NOT_FOUND`, ...) over HTTP as well; `message` is the server's.
    """

    def __init__(self, status: str, message: str) -> None:
        super().__init__(f"{message} ({status})")
        self.status = status
        self.message = message


class SharedMemoryError(ClientError):
    """A region cannot be made, registered, filled or given back."""


def from_triton(error: InferenceServerException, url: str, deadline_s: float) -> ClientError:
    """The error of this library for one of tritonclient's."""
    raw_status = str(error.status() or "")
    message = str(error.message() or error)
    status = _HTTP_STATUS.get(raw_status, raw_status.removeprefix("StatusCode.") or "UNKNOWN")
    text = message.lower()
    if status == "DEADLINE_EXCEEDED":
        return deadline_exceeded(url, deadline_s)
    if status == "UNAVAILABLE" and text.startswith(_QUEUE_TIMEOUT):
        return DeadlineExceeded(f"{url}: the deadline of {deadline_s:g} s passed in the server's queue; it did not run")
    if raw_status == "StatusCode.UNAVAILABLE" and text.startswith(_GRPC_UNREACHABLE):
        return Unreachable(f"{url}: {_last_clause(message)}")
    if raw_status == "StatusCode.UNAVAILABLE" and any(words in text for words in _GRPC_LOST):
        return connection_lost(url, message)
    return ServerRefused(status, message)


def deadline_exceeded(url: str, deadline_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"{url}: no answer within the deadline of {deadline_s:g} s")


def unreachable(url: str, error: OSError) -> Unreachable:
    number = error.errno or 0  # name resolution has its own, negative numbers
    return Unreachable(f"{url}: {os.strerror(number) if number > 0 else error.strerror or error}")


def connection_lost(url: str, reason: object) -> ConnectionLost:
    return ConnectionLost(f"{url}: connection lost, the request may have run: {reason}")


def _last_clause(message: str) -> str:
    """gRPC nests its reasons; the last one is the plain one ("Connection refused")."""
    return message.rsplit(": ", 1)[-1].rstrip("])")
