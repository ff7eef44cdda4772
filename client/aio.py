"""asyncio: the same calls on tritonclient.http.aio and tritonclient.grpc.aio.

Cancelling the task of a call does what its deadline does: gRPC cancels it on the server, HTTP closes the connection.
A client belongs to the event loop that uses it first.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import ModuleType, TracebackType
from typing import Any, Self, TypeVar

import aiohttp
import tritonclient.grpc.aio
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

from client import urls
from client.calls import DEFAULT_DEADLINE_S, Deadline, Retry, server_timeout_us
from client.errors import (
    ClientClosed,
    ClientError,
    WrongOwner,
    connection_lost,
    deadline_exceeded,
    from_triton,
    unreachable,
)
from client.grpc_client import CHANNEL_ARGS
from client.metadata import ModelMetadata, model_metadata
from client.sync import Parameters
from client.tensors import Array, decode, encode, infer_inputs, requested_outputs

T = TypeVar("T")


class AsyncClient(ABC):
    """The calls of AsyncHttpClient and AsyncGrpcClient; see SyncClient for what each does."""

    module: ModuleType
    protocol: str

    def __init__(
        self,
        url: str,
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
        retry: Retry | None = None,
        headers: Mapping[str, str] | None = None,
        **triton_options: Any,
    ) -> None:
        self._address = urls.parse(url, self.protocol)
        self.url = self._address.url
        Deadline(deadline_s, self.url)  # refuse a bad value here, not at the first call
        self._deadline_s = deadline_s
        self._retry = retry or Retry()
        self._headers = headers
        self._triton_options = triton_options
        self._triton: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Array],
        *,
        outputs: Sequence[str] | None = None,
        deadline_s: float | None = None,
        request_id: str = "",
        model_version: str = "",
        priority: int = 0,
        parameters: Parameters | None = None,
    ) -> dict[str, Array]:
        """Run `model` on `inputs` and return its outputs by name; as SyncClient.infer."""
        infer_input_list = infer_inputs(self.module, encode(inputs))
        requested = requested_outputs(self.module, outputs)

        async def attempt(remaining_s: float | None) -> Any:
            return await self.triton.infer(
                model,
                infer_input_list,
                model_version=model_version,
                outputs=requested,
                request_id=request_id,
                priority=priority,
                timeout=server_timeout_us(remaining_s),
                parameters=dict(parameters) if parameters else None,
                **self.options(remaining_s),
            )

        return decode(await self.call(attempt, deadline_s, is_repeatable=self._retry.infer))

    async def is_live(self, *, deadline_s: float | None = None) -> bool:
        """Whether the server process answers."""
        return bool(await self.call(lambda left_s: self.triton.is_server_live(**self.options(left_s)), deadline_s))

    async def is_ready(self, model: str = "", model_version: str = "", *, deadline_s: float | None = None) -> bool:
        """Whether `model`, or without one the server and all of its models, can answer requests."""

        async def attempt(remaining_s: float | None) -> Any:
            if model:
                return await self.triton.is_model_ready(model, model_version, **self.options(remaining_s))
            return await self.triton.is_server_ready(**self.options(remaining_s))

        return bool(await self.call(attempt, deadline_s))

    async def metadata(self, model: str, model_version: str = "", *, deadline_s: float | None = None) -> ModelMetadata:
        """Inputs and outputs of `model`. Raises ServerRefused when it is not loaded."""

        async def attempt(remaining_s: float | None) -> Any:
            return await self.triton.get_model_metadata(
                model, model_version, **self._json_options(), **self.options(remaining_s)
            )

        return model_metadata(await self.call(attempt, deadline_s))

    @property
    def triton(self) -> Any:
        """The tritonclient object underneath; made on first use, inside the event loop."""
        if self._triton is None:
            self._triton = self._open()
        return self._triton

    async def close(self) -> None:
        """Close the connections. Safe to call twice; later calls raise ClientClosed."""
        self._is_closed = True
        triton, self._triton = self._triton, None
        if triton is not None:
            await triton.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def call(
        self, attempt: Callable[[float | None], Awaitable[T]], deadline_s: float | None, is_repeatable: bool = True
    ) -> T:
        """Run `await attempt(remaining_s)` with this client's deadline, repeats and errors; as SyncClient.call."""
        self._check_usable()
        deadline = Deadline(self._deadline_s if deadline_s is None else deadline_s, self.url)
        number = 1
        while True:
            try:
                return await self._attempt(attempt, deadline)
            except ClientError as error:
                wait_s = self._retry.wait_s(number, error, is_repeatable, deadline)
                if wait_s is None:
                    raise
            await asyncio.sleep(wait_s)
            number += 1

    def _check_usable(self) -> None:
        if self._is_closed:
            raise ClientClosed(f"{self.url}: this client was closed; make a new one")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if self._loop is not loop:
            raise WrongOwner(f"{self.url}: this client belongs to another event loop; make one in each loop")

    async def _attempt(self, attempt: Callable[[float | None], Awaitable[T]], deadline: Deadline) -> T:
        """Run one attempt within the deadline; every failure leaves as a ClientError."""
        remaining_s = deadline.remaining_s()
        failure: ClientError
        try:
            async with asyncio.timeout(remaining_s) as timeout:
                return await attempt(remaining_s)
        except InferenceServerException as error:
            failure = from_triton(error, self.url, deadline.seconds)
        except aiohttp.ClientConnectorError as error:
            failure = unreachable(self.url, error.os_error)
        except (aiohttp.ClientError, ConnectionError) as error:
            failure = connection_lost(self.url, error)
        except TimeoutError:
            if not timeout.expired():
                raise
            failure = deadline_exceeded(self.url, deadline.seconds)
        raise failure from None

    @abstractmethod
    def _open(self) -> Any: ...

    def options(self, remaining_s: float | None) -> dict[str, Any]:
        """tritonclient's keywords for headers and, where it has one, the time-out."""
        return {"headers": dict(self._headers)} if self._headers else {}

    def _json_options(self) -> dict[str, Any]:
        return {}


class AsyncHttpClient(AsyncClient):
    """`AsyncHttpClient("127.0.0.1:8000")`; up to `conn_limit` (100) requests at once."""

    module = tritonclient.http
    protocol = "http"

    def _open(self) -> Any:
        return tritonclient.http.aio.InferenceServerClient(
            self._address.host_port, ssl=self._address.has_tls, conn_timeout=None, **self._triton_options
        )


class AsyncGrpcClient(AsyncClient):
    """`AsyncGrpcClient("127.0.0.1:8001")`; any number of requests at once."""

    module = tritonclient.grpc
    protocol = "grpc"

    def _open(self) -> Any:
        options = {"channel_args": list(CHANNEL_ARGS), **self._triton_options}
        return tritonclient.grpc.aio.InferenceServerClient(
            self._address.host_port, ssl=self._address.has_tls, **options
        )

    def options(self, remaining_s: float | None) -> dict[str, Any]:
        return {"client_timeout": remaining_s, **super().options(remaining_s)}

    def _json_options(self) -> dict[str, Any]:
        return {"as_json": True}
