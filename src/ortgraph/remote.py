"""An instance's side of an engine process (engine_process.py): it hands batches over and brings the answers back."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from . import child
from .batch import Request
from .channel import Channel, ChannelClosedError
from .config import ModelConfig
from .engine import CANCEL_CHECK_FROM_S, Answer
from .engine_process import BATCH, HELLO, METRICS, Description, Job
from .errors import CancelledRequest, LoadError, LostEngineError, RequestError
from .metrics import Sink
from .providers.base import Array
from .signature import Signature

_RETRY_S = 0.02


class RemoteEngine:
    """What `Engine` is to the Triton side, with the model in a process that several instances share.

    When that process dies, its requests in flight get an error and the next batch starts another one; where the last
    one answered nothing at all, the engine is unhealthy instead.
    """

    is_asynchronous = False

    def __init__(self, config: ModelConfig, description: Description, link: _Link) -> None:
        """Use `RemoteEngine.load`."""
        assert description.signature
        self.config = config
        self.signature: Signature = description.signature
        self.notes = description.notes
        self.summary = description.summary
        self.metrics = _RemoteMetrics(link.address)
        self.is_healthy = True
        self.loss = ""
        self._link: _Link | None = link
        self._has_answered = True
        self._mean_request_s = 1.0
        self._began_s = 0.0

    @classmethod
    def load(cls, config: ModelConfig) -> RemoteEngine:
        """Join the model's engine process, or start it.

        Raises:
            LoadError: the model cannot be served, or the process died.
        """
        link = _Link(config)
        return cls(config, link.connect(), link)

    def answer(self, requests: Sequence[Request | RequestError]) -> Iterator[tuple[int, Answer]]:
        """Every answer once, with its place in the batch; valid until the next batch.

        A RequestError among the requests is passed on.
        """
        start_s = time.perf_counter()
        is_slow = self._mean_request_s >= CANCEL_CHECK_FROM_S
        places, content = [], []
        arrays: list[Array] = []
        for place, request in enumerate(requests):
            if isinstance(request, RequestError):
                yield place, request
            elif is_slow and request.is_cancelled():
                yield place, CancelledRequest("the request was cancelled before it ran")
            else:
                places.append(place)
                content.append((tuple(request.inputs), tuple(request.outputs)))
                arrays += request.inputs.values()
        if not places:
            return
        try:
            self._send(content, arrays)
            answers, arrays = self._receive()
        except (ChannelClosedError, LoadError) as error:
            failure = self._lost(error)
            yield from ((place, failure) for place in places)
            return
        self._has_answered = True
        self._mean_request_s += 0.1 * ((time.perf_counter() - start_s) / len(places) - self._mean_request_s)
        each = iter(arrays)
        for place, failed, names in answers:
            yield places[place], failed or {name: next(each) for name in names}

    def _send(self, content: object, arrays: Sequence[Array]) -> None:
        """Once more where the process has died since the last batch: it did not have these requests."""
        try:
            self._channel().send((BATCH, content), arrays)
        except ChannelClosedError as error:
            self._lost(error)
            if not self.is_healthy:
                raise
            self._channel().send((BATCH, content), arrays)

    def _receive(self) -> tuple[Any, list[Array]]:
        return self._channel().receive()

    def close(self) -> None:
        """Hang up; the process ends with its last instance. Calling it twice is safe."""
        self.metrics.close()
        if self._link is not None:
            self._link.close()

    def _channel(self) -> Channel:
        """The connection; a new process where the last one died.

        Raises:
            LoadError: the new one could not load the model.
        """
        if self._link is None:
            link = _Link(self.config)
            link.connect()
            self._link = link
            self._has_answered = False
            self.metrics.reconnect(link.address)
        assert self._link.channel
        return self._link.channel

    def _lost(self, error: Exception) -> RequestError:
        link, self._link = self._link, None
        reason = "the engine process ended"
        if link is not None:
            link.close()
            reason += link.ending()
        if isinstance(error, LoadError):
            reason += f": {error}"
        if isinstance(error, LoadError) or not self._has_answered:
            self.is_healthy, self.loss = False, reason
        return LostEngineError(reason)


class _Link:
    """The way to an engine process: its address, the connection, and the process where this one started it."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self.address = _address(config)
        self.channel: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def connect(self) -> Description:
        """Connect, start the process where none listens, and wait until the model is loaded.

        Raises:
            LoadError: it could not be loaded, or the process died while it tried.
        """
        while True:
            try:
                self.channel = _open(self.address)
                self.channel.send((HELLO, None))
                description: Description = self.channel.receive()[0]
                break
            except (ChannelClosedError, ConnectionError, FileNotFoundError) as error:
                # Nobody listens yet, or the process that did has just ended.
                if self._process is not None and (code := self._process.poll()):
                    raise LoadError(f"the engine process died while it loaded the model{_ended_by(code)}") from error
                if self._process is None or self._process.poll() is not None:
                    self._start()
                time.sleep(_RETRY_S)
            except OSError as error:
                raise LoadError(f"the engine process cannot be reached: {error}") from error
        if description.failure:
            self.close()
            raise LoadError(description.failure)
        return description

    def close(self) -> None:
        """Hang up."""
        if self.channel is not None:
            self.channel.close()

    def ending(self) -> str:
        """How the process that hung up ended, where this one started it and it did not end well."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return _ended_by(self._process.wait(1.0)) if self._process is not None else ""
        return ""

    def _start(self) -> None:
        command = child.python_command("ortgraph.engine_process")
        if not command:
            raise LoadError(f"there is no Python {sys.version.split()[0]} to start; set engine_process: off")
        # In a session of its own: Ctrl-C in the server's terminal is for the server.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, env=child.environment(), start_new_session=True
        )
        assert self._process.stdin
        with self._process.stdin as pipe:
            pickle.dump(Job(self.address, self._config), pipe)
        threading.Thread(target=self._process.wait, name="ortgraph-reaper", daemon=True).start()


def _open(address: str) -> Channel:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(address)
        return Channel(connection)
    except BaseException:
        connection.close()
        raise


def _address(config: ModelConfig) -> str:
    """One for all instances of a model version on a device of a server, as long as its file and config are the same."""
    status = config.model_path.stat()
    parts = (
        os.getppid(),
        str(config.model_path.resolve()),
        status.st_size,
        status.st_mtime_ns,
        replace(config, notes=()),
    )
    return f"\0ortgraph-{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}"


def _ended_by(code: int) -> str:
    if code >= 0:
        return f" with exit code {code}" if code else ""
    try:
        return f" by {signal.Signals(-code).name}"
    except ValueError:
        return f" by signal {-code}"


class _RemoteMetrics:
    """The engine process's counts, asked for on a connection of their own: from another thread, in between batches.

    What it has counted since the last time goes to whichever instance asks first; Triton adds them up.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel: Channel | None = None
        self._lock = threading.Lock()

    def pass_on(self, sink: Sink) -> None:
        """Give `sink` what each series has changed by since the last call of any instance."""
        with self._lock:
            try:
                if self._channel is None:
                    self._channel = _open(self._address)
                self._channel.send((METRICS, None))
                grown = self._channel.receive()[0]
            except (ChannelClosedError, OSError):
                self._hang_up()
                return
        for name, labels, value in grown:
            sink(name, labels, value)

    def reconnect(self, address: str) -> None:
        """There is a new process."""
        with self._lock:
            self._hang_up()
            self._address = address

    def close(self) -> None:
        """Hang up."""
        with self._lock:
            self._hang_up()

    def _hang_up(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
