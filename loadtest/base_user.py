"""The base of all users: one request at a time, timed, checked, and reported to Locust as one event."""

from __future__ import annotations

import abc
import random
import time
from collections.abc import Mapping
from typing import Any

from locust import User, constant, task
from locust.env import Environment

from loadtest.answers import Array, check_answer
from loadtest.options import Options
from loadtest.samples import Sample, build_pool


class FailedRequestError(Exception):
    """No answer came: the server's or the client library's message, which Locust's report then shows in full."""


class InferUser(User):  # type: ignore[misc]  # Locust's User is untyped
    """A client in a closed loop. A subclass says how it connects, sends and reads.

    Every sample fires Locust's `request` event with `response_time` in milliseconds as a float from perf_counter.
    An error and a wrong answer are failures. The time is from before the request is encoded until its answer is
    decoded, without the check.
    """

    abstract = True
    wait_time = constant(0)
    protocol = ""

    def on_start(self) -> None:
        """Connect once: the connection is kept for all requests of this user."""
        self.options = Options.of(self.environment.parsed_options)
        self.pool = sample_pool(self.environment)
        self.connect(str(self.host).removeprefix("http://").removeprefix("grpc://").rstrip("/"))

    def on_stop(self) -> None:
        """Close the connection."""
        self.disconnect()

    @task  # type: ignore[untyped-decorator]
    def infer(self) -> None:
        """Send one request drawn from the pool and judge its answer."""
        sample = random.choice(self.pool)
        error: Exception | None = None
        outputs: Mapping[str, Array | None] = {}
        start_time = time.time()
        start_s = time.perf_counter()
        try:
            outputs = self.send(sample)
        except Exception as caught:  # whatever went wrong is this request's failure, not the user's end
            error = FailedRequestError(str(caught) or type(caught).__name__)
            error.__cause__ = caught
        response_time_ms = (time.perf_counter() - start_s) * 1e3
        if error is None:
            try:
                check_answer(sample.expected, outputs, self.options.tolerance)
            except Exception as caught:
                error = caught
        self.environment.events.request.fire(
            request_type=self.protocol,
            name=self.options.model,
            response_time=response_time_ms,
            response_length=sum(array.nbytes for array in outputs.values() if array is not None),
            exception=error,
            context=self.context(),
            start_time=start_time,
        )

    @abc.abstractmethod
    def connect(self, address: str) -> None:
        """Open the connection to `host:port`."""

    @abc.abstractmethod
    def disconnect(self) -> None:
        """Close it; also called where `connect` failed."""

    @abc.abstractmethod
    def send(self, sample: Sample) -> Mapping[str, Array | None]:
        """Send the inputs and wait for all expected outputs, by name."""


def infer(triton: Any, client: Any, model: str, sample: Sample, **options: Any) -> Mapping[str, Array | None]:
    """Send a sample and read its expected outputs; tensors are binary.

    Args:
        triton: tritonclient.http or tritonclient.grpc, whose names are the same; `client` is one of its clients.
        options: more for its `infer`.
    """
    inputs = []
    for name, array in sample.inputs.items():
        tensor = triton.InferInput(name, list(array.shape), triton.np_to_triton_dtype(array.dtype))
        inputs.append(tensor.set_data_from_numpy(array))
    outputs = [triton.InferRequestedOutput(name) for name in sample.expected]
    result = client.infer(model, inputs, outputs=outputs, **options)
    return {name: result.as_numpy(name) for name in sample.expected}


_pools: dict[Options, list[Sample]] = {}


def sample_pool(environment: Environment) -> list[Sample]:
    """The samples for the environment's options, computed once in a process."""
    options = Options.of(environment.parsed_options)
    if options not in _pools:
        _pools[options] = build_pool(
            options.repository / options.model, options.lengths, count=options.requests, texts=options.texts
        )
    return _pools[options]


def prepare(environment: Environment, **_: Any) -> None:
    """For Locust's `init`, before its clock starts, and for `test_start`, as its web UI may change the options."""
    sample_pool(environment)
