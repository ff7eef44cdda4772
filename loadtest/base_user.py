"""The base of all users: one request at a time, timed, checked, and reported to Locust as one event."""

from __future__ import annotations

import abc
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import gevent
import numpy as np
from locust import User, task
from locust.env import Environment
from locust.exception import StopUser

from benchmarks import machine
from loadtest.answers import Array, check_answer
from loadtest.arrivals import Timer
from loadtest.options import Requests, tolerance
from loadtest.recorder import recorder
from loadtest.samples import Sample, build_pool


class FailedRequestError(Exception):
    """No answer came: the server's or the client library's message, which Locust's report then shows in full."""


class InferUser(User):  # type: ignore[misc]  # Locust's User is untyped
    """A client with one connection and one request on its way. A subclass says how it connects, sends and reads.

    In a closed loop the next request is sent when the answer to the last one is there. In an open loop (`--rate`) the
    process's users share one list of moments at which requests are due; whoever is free takes the next. The latency
    then counts from that moment, also when all users had to wait for a slow server.

    Every sample fires Locust's `request` event with `response_time` in milliseconds as a float from perf_counter.
    An error and a wrong answer are failures. The time ends with the answer's last byte, before it is checked.
    """

    abstract = True
    protocol: ClassVar[str] = ""

    def on_start(self) -> None:
        """Make the requests ready and connect; the connection is kept for all requests of this user."""
        parsed = self.environment.parsed_options
        self.options = Requests.of(parsed)
        self.timeout_s, self.tolerance = float(parsed.timeout_s), tolerance(parsed)
        self.is_open, self.recorder = parsed.rate > 0, recorder(self.environment)
        self.timer, self.due_s = Timer(), 0.0
        self.address = str(self.host).removeprefix("http://").removeprefix("grpc://").rstrip("/")
        try:
            self.pool = sample_pool(self.environment)
            self.requests = self.prepare(self.options.model, self.pool)
            self.connect()
        except Exception as error:  # no GPU for its memory, say, or a server that cannot open it
            why = f"{error} ({error.__cause__})" if error.__cause__ else str(error)
            self.recorder.samples.fail(f"a user could not start: {why}", self.recorder.elapsed_s)
            raise StopUser from error

    def on_stop(self) -> None:
        """Close the connection."""
        self.timer.close()
        self.disconnect()

    def wait_time(self) -> float:
        """Seconds for Locust to wait, in which it may stop the user; the rest up to the exact moment is `infer`'s."""
        if not self.is_open:
            return 0.0
        due_s = self.recorder.take()
        while due_s is None:  # the load is over: wait to be stopped
            gevent.sleep(0.1)
        self.due_s = due_s
        return max(due_s - Timer.COARSE_S - time.perf_counter(), 0.0)

    @task  # type: ignore[untyped-decorator]
    def infer(self) -> None:
        """Send one request drawn from the pool and judge its answer."""
        if self.is_open:
            if not self.due_s:
                return  # Locust's first turn, before the first wait
            self.timer.wait_until(self.due_s)
            self.recorder.sent(self.due_s)
        number = random.randrange(len(self.pool))
        error: Exception | None = None
        answer: Any = None
        start_time, sent_s = time.time(), time.perf_counter()
        try:
            answer = self.send(self.requests[number])
        except Exception as caught:  # whatever went wrong is this request's failure, not the user's end
            error = FailedRequestError(str(caught) or type(caught).__name__)
            error.__cause__ = caught
        except gevent.GreenletExit:
            # After Locust's stop timeout. A younger one was sent just when Locust stopped the user.
            if time.perf_counter() - sent_s > 0.9 * self.environment.stop_timeout:
                self.recorder.samples.fail("no answer came until the test ended", sent_s - self.recorder.start_s)
            raise
        end_s = time.perf_counter()
        due_s = self.due_s if self.is_open else sent_s
        outputs: Mapping[str, Array | None] = {}
        if error is None:
            try:
                outputs = self.read(answer)
                check_answer(self.pool[number].expected, outputs, self.tolerance)
            except Exception as caught:
                error = caught
        self.environment.events.request.fire(
            request_type=self.protocol,
            name=self.options.model,
            response_time=(end_s - due_s) * 1e3,
            response_length=sum(array.nbytes for array in outputs.values() if array is not None),
            exception=error,
            context={**self.context(), "due_s": due_s, "service_ms": (end_s - sent_s) * 1e3},
            start_time=start_time - (sent_s - due_s),
        )

    @abc.abstractmethod
    def prepare(self, model: str, pool: Sequence[Sample]) -> Sequence[Any]:
        """What `send` takes, for each sample: as ready to send as can be."""

    @abc.abstractmethod
    def connect(self) -> None:
        """Open the connection to `self.address`, `host:port`."""

    @abc.abstractmethod
    def disconnect(self) -> None:
        """Close it; also called where `connect` failed."""

    @abc.abstractmethod
    def send(self, request: Any) -> Any:
        """Send a prepared request and wait for its whole answer."""

    @abc.abstractmethod
    def read(self, answer: Any) -> Mapping[str, Array | None]:
        """An answer's outputs by name; this is not timed."""


_pools: dict[tuple[Requests, int], list[Sample]] = {}


def sample_pool(environment: Environment) -> list[Sample]:
    """The samples for the environment's options, computed once in a process."""
    parsed = environment.parsed_options
    options, seed = Requests.of(parsed), int(parsed.seed)
    if (options, seed) not in _pools:
        pool = build_pool(
            options.repository / options.model,
            options.lengths,
            count=options.count,
            rows=options.rows,
            texts=options.texts,
            images=options.images,
            seed=seed,
            is_gpu=bool(machine.gpus()),
        )
        if options.is_noop:
            pool = [Sample(s.inputs, {name: np.zeros_like(a) for name, a in s.expected.items()}) for s in pool]
        _pools[options, seed] = pool
    return _pools[options, seed]
