"""What the two blocking clients share: the calls, their deadlines and repeats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, TracebackType
from typing import Any, Self, TypeVar

from client.calls import Deadline, Retry, server_timeout_us
from client.errors import ClientClosed, ClientError
from client.metadata import ModelMetadata, model_metadata
from client.tensors import Array, decode, encode, infer_inputs, requested_outputs
from client.urls import Address

T = TypeVar("T")
Parameters = Mapping[str, str | int | bool | float]


class SyncClient(ABC):
    """The calls of HttpClient and GrpcClient. All times are seconds; `math.inf` is no deadline."""

    module: ModuleType  # tritonclient.http or tritonclient.grpc

    def __init__(
        self, address: Address, deadline_s: float, retry: Retry | None, headers: Mapping[str, str] | None
    ) -> None:
        Deadline(deadline_s, address.url)  # refuse a bad value here, not at the first call
        self.url = address.url
        self._address = address
        self._deadline_s = deadline_s
        self._retry = retry or Retry()
        self._headers = headers
        self._is_closed = False

    def infer(
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
        """Run `model` on `inputs` (name to array, with the batch dimension) and return its outputs by name.

        `outputs` None asks for all; `model_version` "" lets the server choose. `deadline_s` covers the whole call,
        repeats included (None: the client's). Answers may be read-only; copy before writing to them.

        The deadline is also sent as Triton's request timeout. A model whose config has `dynamic_batching` with
        `default_queue_policy { timeout_action: REJECT  default_timeout_microseconds: N  allow_timeout_override: true }`
        and N above the deadline drops the request from its queue then. Over gRPC the server is told as well: the
        request leaves any queue, and a running model sees `is_cancelled()`. Over HTTP the connection is closed, but
        Triton 24.10 does not notice: what has left the queue runs to its end.

        Raises InvalidInput, Unreachable, ConnectionLost, DeadlineExceeded, ServerRefused (see client/errors.py).
        """
        result = self.infer_prepared(
            model,
            infer_inputs(self.module, encode(inputs)),
            outputs=requested_outputs(self.module, outputs),
            deadline_s=deadline_s,
            request_id=request_id,
            model_version=model_version,
            priority=priority,
            parameters=parameters,
        )
        return decode(result)

    def infer_prepared(
        self,
        model: str,
        inputs: Sequence[Any],
        *,
        outputs: Sequence[Any] | None = None,
        deadline_s: float | None = None,
        request_id: str = "",
        model_version: str = "",
        priority: int = 0,
        parameters: Parameters | None = None,
    ) -> Any:
        """`infer` with tritonclient's own InferInput, InferRequestedOutput and InferResult objects."""

        def attempt(remaining_s: float | None) -> Any:
            return self.triton.infer(
                model,
                inputs,
                model_version=model_version,
                outputs=outputs,
                request_id=request_id,
                priority=priority,
                timeout=server_timeout_us(remaining_s),
                parameters=dict(parameters) if parameters else None,
                **self.options(remaining_s),
            )

        return self.call(attempt, deadline_s, is_repeatable=self._retry.infer)

    def is_live(self, *, deadline_s: float | None = None) -> bool:
        """Whether the server process answers."""
        return bool(self.call(lambda left_s: self.triton.is_server_live(**self.options(left_s)), deadline_s))

    def is_ready(self, model: str = "", model_version: str = "", *, deadline_s: float | None = None) -> bool:
        """Whether `model`, or without one the server and all of its models, can answer requests."""

        def attempt(remaining_s: float | None) -> Any:
            if model:
                return self.triton.is_model_ready(model, model_version, **self.options(remaining_s))
            return self.triton.is_server_ready(**self.options(remaining_s))

        return bool(self.call(attempt, deadline_s))

    def metadata(self, model: str, model_version: str = "", *, deadline_s: float | None = None) -> ModelMetadata:
        """Inputs and outputs of `model`. Raises ServerRefused when it is not loaded."""

        def attempt(remaining_s: float | None) -> Any:
            return self.triton.get_model_metadata(
                model, model_version, **self._json_options(), **self.options(remaining_s)
            )

        return model_metadata(self.call(attempt, deadline_s))

    @property
    @abstractmethod
    def triton(self) -> Any:
        """The tritonclient object underneath, for what this library leaves out."""

    @abstractmethod
    def close(self) -> None:
        """Close the connections. Safe to call twice; later calls raise ClientClosed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def call(self, attempt: Callable[[float | None], T], deadline_s: float | None, is_repeatable: bool = True) -> T:
        """Run `attempt(remaining_s)` with this client's deadline, repeats and errors.

        For calls that this library leaves out: `client.call(lambda s: client.triton.x(..., **client.options(s)))`.
        """
        self._check_usable()
        deadline = Deadline(self._deadline_s if deadline_s is None else deadline_s, self.url)
        number = 1
        while True:
            try:
                return self._attempt(attempt, deadline)
            except ClientError as error:
                wait_s = self._retry.wait_s(number, error, is_repeatable, deadline)
                if wait_s is None:
                    raise
            self._sleep(wait_s)
            number += 1

    def _check_usable(self) -> None:
        if self._is_closed:
            raise ClientClosed(f"{self.url}: this client was closed; make a new one")

    @abstractmethod
    def _attempt(self, attempt: Callable[[float | None], T], deadline: Deadline) -> T:
        """Run one attempt within the deadline; every failure leaves as a ClientError."""

    @abstractmethod
    def options(self, remaining_s: float | None) -> dict[str, Any]:
        """tritonclient's keywords for headers and, where it has one, the time-out."""

    def _json_options(self) -> dict[str, Any]:
        return {}

    @staticmethod
    @abstractmethod
    def _sleep(seconds: float) -> None: ...
