"""A user over HTTP with binary tensors: the request's bytes are made once, the connection is kept open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loadtest.answers import Array
from loadtest.base_user import InferUser
from loadtest.connection import Connection
from loadtest.samples import Sample
from loadtest.wire import decode, encode


class InferHttpUser(InferUser):
    """One connection a user; one that broke is opened anew for the next request."""

    protocol = "HTTP"
    host = "127.0.0.1:8000"
    connection: Connection | None = None

    def prepare(self, model: str, pool: Sequence[Sample]) -> Sequence[bytes]:
        return encoded(model, pool)

    def connect(self) -> None:
        """Nothing yet: a server that cannot be reached is a failure of each request."""

    def disconnect(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def send(self, request: bytes) -> tuple[int, memoryview, int]:
        if self.connection is None:
            host, _, port = self.address.rpartition(":")
            self.connection = Connection(host.strip("[]"), int(port), self.timeout_s)
        try:
            return self.connection.ask(request)
        except BaseException:  # also when Locust stops the user: its answer must not be read as the next one's
            self.disconnect()
            raise

    def read(self, answer: tuple[int, memoryview, int]) -> Mapping[str, Array | None]:
        return decode(*answer)


_encoded: dict[tuple[str, int], Sequence[bytes]] = {}


def encoded(model: str, pool: Sequence[Sample]) -> Sequence[bytes]:
    """The requests of a pool as bytes; made once for all users of a process, which share the pool."""
    key = model, id(pool)
    if key not in _encoded:
        _encoded[key] = [encode(model, sample.inputs, list(sample.expected)) for sample in pool]
    return _encoded[key]
