"""The load client: a closed loop of HTTP clients in a process of its own.

One thread and one selector drive all clients. Every client has one connection and one request on its way (closed
loop) and draws each request anew from the pool. An answer is checked after the client's next request was sent, so
that checking delays no one's clock but is never skipped. At the end of a job every answer still on its way is awaited.
"""

from __future__ import annotations

import os
import random
import selectors
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context

from loadtest.answers import WrongAnswerError, check_answer
from loadtest.connection import Connection
from loadtest.wire import RefusedError, Shot, decode


@dataclass(frozen=True)
class Job:
    """One slice of load on one server, with requests from the pool named `load`.

    Answers that come within `warmup_s` of the start do not count.
    """

    load: str
    host: str
    port: int
    clients: int
    warmup_s: float
    duration_s: float
    seed: int
    is_checked: bool = True
    tolerance: float | None = None
    timeout_s: float = 60.0


@dataclass
class Measurement:
    """Latencies of right answers; throughput is their number by `measured_s`. `elapsed_s` has the warm-up too."""

    latencies_ms: list[float] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)
    measured_s: float = 0.0
    elapsed_s: float = 0.0
    loader_cpu_s: float = 0.0


def run(job: Job, pool: Sequence[Shot]) -> Measurement:
    """Drive the load of one job."""
    rng = random.Random(job.seed)
    failures: Counter[str] = Counter()
    latencies_ms: list[float] = []
    connections = [Connection(job.host, job.port, job.timeout_s) for _ in range(job.clients)]
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection.socket, selectors.EVENT_READ, connection)
        start_s = time.perf_counter()
        begin_s = start_s + job.warmup_s
        end_s = begin_s + job.duration_s
        cpu_s = 0.0
        is_warm = False
        for connection in connections:
            _send(connection, pool, rng)
        open_count = len(connections)
        while open_count:
            ready = selector.select(job.timeout_s)
            if not ready:
                failures["timeout"] += open_count
                break
            for key, _ in ready:
                connection = key.data
                if not connection.receive():
                    continue
                now_s = time.perf_counter()
                if not is_warm and now_s >= begin_s:
                    is_warm, cpu_s = True, time.process_time()
                shot, sent_s, answer = connection.shot, connection.sent_s, connection.answer()
                if now_s < end_s:
                    _send(connection, pool, rng)
                else:
                    open_count -= 1
                error = _error(answer, pool[shot], job)
                if error:
                    failures[error] += 1
                elif begin_s <= now_s < end_s:
                    latencies_ms.append((now_s - sent_s) * 1e3)
        spent_s = time.process_time() - cpu_s
    for connection in connections:
        connection.close()
    return Measurement(latencies_ms, dict(failures), job.duration_s, time.perf_counter() - start_s, spent_s)


def _send(connection: Connection, pool: Sequence[Shot], rng: random.Random) -> None:
    shot = rng.randrange(len(pool))
    connection.send(shot, pool[shot].request)


def _error(answer: tuple[int, memoryview, int], shot: Shot, job: Job) -> str:
    try:
        outputs = decode(*answer)
        if job.is_checked:
            check_answer(shot.expected, outputs, job.tolerance)
    except RefusedError as error:
        return str(error)
    except (WrongAnswerError, KeyError, ValueError) as error:
        return f"wrong answer: {error}"
    return ""


class LoadProcesses:
    """Processes of their own for `run`, so that the load does not share a GIL with anything. A context manager.

    The clients of a job are dealt to the processes: a single one would be the ceiling of a server on many cores.
    """

    def __init__(self, pools: Mapping[str, Sequence[Shot]]) -> None:
        self._count = max(1, min(4, len(os.sched_getaffinity(0)) // 4))
        self._executor = ProcessPoolExecutor(
            self._count, mp_context=get_context("spawn"), initializer=_keep_pools, initargs=(dict(pools),)
        )

    def run(self, job: Job) -> Measurement:
        """Run one job there. Raises OSError when the server does not answer."""
        shares = [job.clients // self._count + (i < job.clients % self._count) for i in range(self._count)]
        jobs = [replace(job, clients=n, seed=job.seed * self._count + i) for i, n in enumerate(shares) if n]
        whole = Measurement(measured_s=job.duration_s)
        for part in self._executor.map(_run_kept, jobs):
            whole.latencies_ms += part.latencies_ms
            whole.failures = dict(Counter(whole.failures) + Counter(part.failures))
            whole.elapsed_s = max(whole.elapsed_s, part.elapsed_s)
            whole.loader_cpu_s += part.loader_cpu_s
        return whole

    def __enter__(self) -> LoadProcesses:
        return self

    def __exit__(self, *error: object) -> None:
        self._executor.shutdown()


_pools: dict[str, Sequence[Shot]] = {}  # of the load process: sent there once


def _keep_pools(pools: Mapping[str, Sequence[Shot]]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the process that started this one
    _pools.update(pools)


def _run_kept(job: Job) -> Measurement:
    return run(job, _pools[job.load])
