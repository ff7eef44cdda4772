"""Several batches in flight: the next is staged and started while the device works on the one before.

For `response_mode: sender`. `submit` is called by Triton's thread with each batch and returns as soon as no more than
`depth` batches are in flight, so that Triton's queue fills instead of being cut into crumbs. Whoever is free first
completes a batch: `submit`, when the oldest one is done or must make room, or a helper thread when no batch comes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from .batch import Request
from .engine import Answer, Batch, Engine
from .errors import RequestError

Send = Callable[[int, Answer], None]
_SENDERS = 1  # more threads wait for the interpreter longer than they save


class _Entry:
    """A batch in flight and where its answers go."""

    def __init__(self, batch: Batch, send: Send) -> None:
        self.batch = batch
        self.send = send
        self.is_claimed = False
        self.completed = threading.Event()


def _send_all(send: Send, answers: list[tuple[int, Answer]]) -> None:
    for index, answer in answers:
        send(index, answer)


def _parts(answers: list[tuple[int, Answer]], size: int) -> list[list[tuple[int, Answer]]]:
    return [answers[start : start + size] for start in range(0, len(answers), max(size, 1))]


class Pipeline:
    """Batches of one engine in flight, oldest first."""

    def __init__(self, engine: Engine, depth: int) -> None:
        self._engine = engine
        self._depth = depth
        self._entries: deque[_Entry] = deque()
        self._changed = threading.Condition()
        self._is_closing = False
        self._is_staging = False
        # Sending waits for the server to take the answer (tens of us, without the GIL): two threads wait at once.
        self._senders = ThreadPoolExecutor(_SENDERS, "ortgraph-sender")
        self._helper = threading.Thread(target=self._help, name="ortgraph-responses", daemon=True)
        self._helper.start()

    def submit(self, batch: Batch, send: Send) -> None:
        """Take over a batch that was begun; `send` gets every answer and its place in the batch, from either thread."""
        with self._changed:
            self._entries.append(_Entry(batch, send))
        while oldest := self._oldest_to_complete():
            self._complete(oldest)
        with self._changed:
            self._is_staging = False
            self._changed.notify()

    def begin(self, requests: Callable[[], Sequence[Request | RequestError]]) -> Batch:
        """Read a batch's requests and launch them; until `submit` the helper leaves this thread the interpreter."""
        with self._changed:
            self._is_staging = True
        return self._engine.begin(requests())

    def _oldest_to_complete(self) -> _Entry | None:
        """The oldest batch when there is no room for another one, or when its answers are there to be sent."""
        with self._changed:
            if not self._entries:
                return None
            oldest = self._entries[0]
            is_full = len(self._entries) >= self._depth
        return oldest if is_full or (not oldest.is_claimed and oldest.batch.is_done()) else None

    def close(self) -> None:
        """Complete everything in flight, then stop the helper."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._helper.join()
        self._senders.shutdown()

    def _help(self) -> None:
        while True:
            with self._changed:
                while not self._entries and not self._is_closing:
                    self._changed.wait()
                if not self._entries:
                    return
                oldest = self._entries[0]
            oldest.batch.wait()
            with self._changed:
                while self._is_staging and not self._is_closing:
                    self._changed.wait()
            self._complete(oldest)

    def _complete(self, entry: _Entry) -> None:
        """Answer a batch, or wait until the other thread has."""
        with self._changed:
            is_mine = not entry.is_claimed
            entry.is_claimed = True
        if not is_mine:
            entry.completed.wait()
            return
        try:
            answers = list(self._engine.finish(entry.batch))
            share = -(-len(answers) // (_SENDERS + 1))
            others = [self._senders.submit(_send_all, entry.send, part) for part in _parts(answers[share:], share)]
            _send_all(entry.send, answers[:share])
            wait(others)
        finally:
            with self._changed:
                self._entries.remove(entry)
            entry.completed.set()
