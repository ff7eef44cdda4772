"""One kept-open HTTP connection with one request on its way: only what talking to Triton needs.

It shares the machine with the server that it measures, so it does little: no library of general use is this light.
"""

from __future__ import annotations

import re
import socket
import time

_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_JSON_LENGTH = re.compile(rb"(?i)\r\ninference-header-content-length: *(\d+)")


class Connection:
    """A closed loop of one client: `send`, then `receive` whenever bytes have come until there is an answer."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self.socket = socket.create_connection((host, port), timeout=timeout_s)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.shot = -1  # the number of the request on its way
        self.sent_s = 0.0
        self._reset()

    def _reset(self) -> None:
        self._got = bytearray()
        self._total = 0
        self._head = 0

    def send(self, shot: int, request: bytes) -> None:
        """Send a request; the clock starts before its first byte."""
        self.shot = shot
        self._reset()
        self.sent_s = time.perf_counter()
        self.socket.sendall(request)

    def receive(self) -> bool:
        """Read what is there; True when the answer is complete. Raises ConnectionError when the server hangs up."""
        data = self.socket.recv(1 << 20)
        if not data:
            raise ConnectionError("the server closed the connection")
        self._got += data
        if not self._total:
            end = self._got.find(b"\r\n\r\n")
            if end < 0:
                return False
            length = _LENGTH.search(self._got, 0, end)
            if length is None:
                raise ConnectionError("the answer has no Content-Length")
            self._head = end + 4
            self._total = self._head + int(length[1])
        return len(self._got) >= self._total

    def answer(self) -> tuple[int, memoryview, int]:
        """Status code, body, and the size of the body's JSON part."""
        match = _JSON_LENGTH.search(self._got, 0, self._head)
        body = memoryview(self._got)[self._head : self._total]
        return int(self._got[9:12]), body, int(match[1]) if match else len(body)

    def ask(self, request: bytes) -> tuple[int, memoryview, int]:
        """Send, and wait for the whole answer (see `answer`)."""
        self.send(0, request)
        while not self.receive():
            pass
        return self.answer()

    def close(self) -> None:
        """Close the socket; twice is safe."""
        self.socket.close()
