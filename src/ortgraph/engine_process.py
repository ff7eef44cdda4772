"""One engine for all instances of a model on a device, in a process of its own (`main`).

Triton prepares and answers the batches of several instances at once, each in its own process (remote.py). Here what
they send meets: whatever waits when the device is about to be free is grouped and launched together, so that the device
has large batches while Triton's own work runs beside it. Weights, graphs and the CUDA context exist once. A crash, or a
lost CUDA context, ends this process alone; the instances start another.

It reads a pickle of `Job` from standard input, listens on a socket of Linux's abstract namespace and ends with the last
instance that hangs up. A second process for the same job finds the name taken and ends at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import select
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from .batch import Request
from .channel import Channel, ChannelClosedError
from .config import ModelConfig
from .engine import Answer, Batch, Engine, Flight
from .errors import LoadError, RequestError, RunError, first_line
from .metrics import Labels
from .providers.base import Array
from .signature import Signature

# Kinds of message. Each is answered, in the order HELLO, then any number of the others.
HELLO, BATCH, METRICS = "hello", "batch", "metrics"
LOST = 70
_MAX_FLIGHTS = 4
_FIRST_WAIT_S = 60.0
_MARGIN_S = 100e-6
_OVERDUE_SLEEP_S = 50e-6
_PR_SET_TIMERSLACK = 29


@dataclass(frozen=True)
class Job:
    """Which model, and the name to listen on."""

    address: str
    config: ModelConfig


@dataclass(frozen=True)
class Description:
    """What an instance must know of the loaded model; with `failure` it was not loaded."""

    signature: Signature | None = None
    notes: tuple[str, ...] = ()
    summary: str = ""
    failure: str = ""


@dataclass(eq=False)
class _Work:
    """An instance's batch: its answers so far, each with its place."""

    channel: Channel
    requests: list[Request]
    answers: list[tuple[int, Answer]] = field(default_factory=list)


@dataclass(frozen=True)
class _Running:
    """A group on the device, and for each place in its batch the work and the place there."""

    batch: Batch
    owners: Sequence[tuple[_Work, int]]
    seconds: float


class Host:
    """The loop: take batches, launch what waits, answer what is done. One thread does all."""

    def __init__(self, listener: socket.socket, engine: Engine) -> None:
        """`listener` is bound and listening."""
        self._listener = listener
        self._engine = engine
        self._description = Description(engine.signature, tuple(engine.findings.notes), engine.summary)
        self._channels: list[Channel] = []
        self._instances: set[Channel] = set()
        self._has_served = False
        self._waiting: list[_Work] = []
        self._running: deque[_Running] = deque()
        self._free_at_s = 0.0  # when the device will have nothing to do, by the measured time of each bucket
        self._staging_s = 25e-6  # of a request
        self._sleeps = not engine.config.busy_wait_events

    def run(self) -> None:
        """Serve until the last instance has gone, or none came."""
        while self._channels or self._running or not self._has_served:
            sockets: list[socket.socket | Channel] = [self._listener, *self._channels]
            ready = select.select(sockets, (), (), self._timeout_s())[0]
            for each in ready:
                if isinstance(each, Channel):
                    self._take(each)
                else:
                    self._accept()
            if not ready and not self._channels:
                return
            while self._running and self._is_done(self._running[0]):
                self._answer(self._running.popleft())
            if self._is_time():
                self._launch()

    def _timeout_s(self) -> float | None:
        """How long nothing can happen but a message."""
        if not self._running:
            return None if self._channels else _FIRST_WAIT_S
        if not self._engine.tells_when_done or not self._sleeps:
            return 0.0
        left_s = self._free_at_s - time.perf_counter() - _MARGIN_S
        if self._waiting:
            left_s -= self._lead_s()
        if left_s < -10 * _MARGIN_S:
            return _OVERDUE_SLEEP_S
        return max(left_s, 0.0)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            self._channels.append(Channel(self._listener.accept()[0]))
            self._has_served = True

    def _take(self, channel: Channel) -> None:
        """Read a message; what needs no device is answered."""
        try:
            (kind, content), arrays = channel.receive()
            if kind == BATCH:
                self._instances.add(channel)
                each = iter(arrays)
                requests = [Request({name: next(each) for name in names}, outputs) for names, outputs in content]
                self._waiting.append(_Work(channel, requests))
            elif kind == METRICS:
                grown: list[tuple[str, Labels, float]] = []
                self._engine.metrics.pass_on(lambda *series: grown.append(series))
                channel.send(grown)
            else:
                channel.send(self._description)
        except ChannelClosedError:
            self._drop(channel)

    def _drop(self, channel: Channel) -> None:
        """An instance has gone, or its process has died: what it waited for is not run, or answered to nobody."""
        if channel in self._channels:
            self._channels.remove(channel)
        self._instances.discard(channel)
        self._waiting = [work for work in self._waiting if work.channel is not channel]
        channel.close()

    def _is_done(self, running: _Running) -> bool:
        return not self._engine.tells_when_done or running.batch.is_done()

    def _lead_s(self) -> float:
        """How long before the device is free the launch of what waits must begin."""
        return _MARGIN_S + self._staging_s * sum(len(work.requests) for work in self._waiting)

    def _is_time(self) -> bool:
        if not self._waiting or len(self._running) >= _MAX_FLIGHTS:
            return False
        # All have sent: waiting longer brings nothing more.
        is_all = len(self._waiting) + len({w.channel for r in self._running for w, _ in r.owners}) >= len(
            self._instances
        )
        return not self._running or is_all or self._free_at_s - time.perf_counter() <= self._lead_s()

    def _launch(self) -> None:
        works, self._waiting = self._waiting, []
        requests = [request for work in works for request in work.requests]
        owners = [(work, place) for work in works for place in range(len(work.requests))]
        start_s = time.perf_counter()
        try:
            batch = self._engine.begin(requests)
        except Exception as error:  # a fault of ours: these requests get it, the others are served on
            traceback.print_exc()
            failure = RunError(f"the engine failed: {first_line(error)}")
            self._deliver((owner, failure) for owner in owners)
            return
        end_s = time.perf_counter()
        self._staging_s += 0.1 * ((end_s - start_s) / max(len(requests), 1) - self._staging_s)
        for part in _parts(batch):
            seconds = sum(self._seconds(flight) for flight in part.flights)
            self._running.append(_Running(part, owners, seconds))
            self._free_at_s = max(self._free_at_s, end_s) + seconds

    def _seconds(self, flight: Flight) -> float:
        return self._engine.table.cost(flight.group.bucket or flight.group.sizes)

    def _answer(self, running: _Running) -> None:
        self._free_at_s = time.perf_counter() + sum(each.seconds for each in self._running)
        self._deliver((running.owners[place], answer) for place, answer in self._engine.finish(running.batch))
        if not self._engine.is_healthy:
            print("ortgraph: the CUDA context is lost; the engine process ends", file=sys.stderr, flush=True)
            os._exit(LOST)

    def _deliver(self, answers: Iterable[tuple[tuple[_Work, int], Answer]]) -> None:
        """Keep answers until those of an instance's batch are all there; then send them."""
        for (work, place), answer in answers:
            work.answers.append((place, answer))
            if len(work.answers) < len(work.requests) or work.channel not in self._instances:
                continue
            described: list[tuple[int, RequestError | None, tuple[str, ...]]] = []
            arrays: list[Array] = []
            for at, each in work.answers:
                if isinstance(each, RequestError):
                    described.append((at, each, ()))
                else:
                    described.append((at, None, tuple(each)))
                    arrays += each.values()
            try:
                work.channel.send(described, arrays)
            except ChannelClosedError:
                self._drop(work.channel)


def _parts(batch: Batch) -> list[Batch]:
    """A batch for each group, so that each is answered when it is done; the refused are with the first."""
    if len(batch.flights) < 2:
        return [batch]
    first, *others = batch.flights
    return [replace(batch, flights=[first]), *(replace(batch, flights=[each], refused={}) for each in others)]


def _refuse(listener: socket.socket, failure: str) -> None:
    """Tell every instance that the model was not loaded; ends when none has asked for a while."""
    listener.settimeout(1.0)
    with contextlib.suppress(OSError):
        while True:
            channel = Channel(listener.accept()[0])
            with contextlib.suppress(ChannelClosedError):
                channel.receive()
                channel.send(Description(failure=failure))
            channel.close()


def main() -> None:
    """The process: load, then serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's; this ends with the instances
    job: Job = pickle.load(sys.stdin.buffer)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(job.address)
    except OSError:
        return
    listener.listen(64)
    try:
        engine = Engine.load(job.config)
    except LoadError as error:
        _refuse(listener, str(error))
        return
    gc.collect()
    gc.freeze()
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)  # ns; else the kernel adds 50 us to every short sleep
    try:
        Host(listener, engine).run()
    finally:
        listener.close()
        engine.close()
