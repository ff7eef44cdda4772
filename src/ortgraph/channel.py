"""Messages between two processes of a machine: a small object over a Unix socket, its arrays in shared memory.

Each side owns the memory that it writes and copies a message's arrays into it; the other side has it mapped and reads
them in place. They stay as they are until the writer's next message, so the two sides must take turns.
"""

from __future__ import annotations

import array
import contextlib
import mmap
import os
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from .providers.base import Array

_ALIGN_BYTES = 64
_FIRST_BYTES = 1 << 20
_HEADER = struct.Struct("<I")
_READ_BYTES = 1 << 16
_ONE_FD = socket.CMSG_SPACE(array.array("i", [0]).itemsize)


class ChannelClosedError(Exception):
    """The other side has gone."""


class Channel:
    """One end of a connection. The peer runs as the same user; what it sends is trusted."""

    def __init__(self, connection: socket.socket) -> None:
        """Raises PermissionError when another user is at the other end."""
        self._socket = connection
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] != os.getuid():
            connection.close()
            raise PermissionError("the process at the other end runs as another user")
        self._own: mmap.mmap | None = None
        self._own_bytes = 0
        self._theirs: mmap.mmap | None = None

    def fileno(self) -> int:
        """For `select`."""
        return self._socket.fileno()

    def send(self, message: object, arrays: Sequence[Array] = ()) -> None:
        """Send a picklable object and arrays of plain numpy element types (no objects).

        Raises:
            ChannelClosedError: nobody is there any more.
        """
        places, end = [], 0
        for each in arrays:
            places.append((each.dtype.str, each.shape, end))
            end += -(-each.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        descriptor = self._grow(end) if end > self._own_bytes else None
        for each, (_, shape, offset) in zip(arrays, places, strict=True):
            np.ndarray(shape, each.dtype, self._own, offset)[...] = each
        body = pickle.dumps((message, places), pickle.HIGHEST_PROTOCOL)
        data = _HEADER.pack(len(body)) + body
        try:
            if descriptor is not None:
                sent = socket.send_fds(self._socket, [data], [descriptor])
                data = data[sent:]
            self._socket.sendall(data)
        except OSError as error:
            raise ChannelClosedError from error
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def receive(self) -> tuple[Any, list[Array]]:
        """Wait for a message; its arrays are views of the other side's memory.

        Raises:
            ChannelClosedError: nobody is there any more.
        """
        try:
            data, ancillary, _, _ = self._socket.recvmsg(_READ_BYTES, _ONE_FD)
            for _, _, packed in ancillary:
                descriptor = array.array("i", packed)[0]
                self._theirs = mmap.mmap(descriptor, 0)
                os.close(descriptor)
            data = self._complete(data, _HEADER.size)
            data = self._complete(data, _HEADER.size + _HEADER.unpack_from(data)[0])
        except OSError as error:
            raise ChannelClosedError from error
        message, places = pickle.loads(memoryview(data)[_HEADER.size :])
        return message, [np.ndarray(shape, kind, self._theirs, offset) for kind, shape, offset in places]

    def close(self) -> None:
        """Hang up; the mapped memory goes with the last array."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _complete(self, data: bytes, size: int) -> bytes:
        parts, missing = [data], size - len(data)
        while missing > 0:
            part = self._socket.recv(missing) if data else b""
            if not part:
                raise ChannelClosedError
            parts.append(part)
            missing -= len(part)
        return b"".join(parts) if len(parts) > 1 else data

    def _grow(self, size_bytes: int) -> int:
        """Own memory of at least this size; what was there goes when its last reader does."""
        size_bytes = max(_FIRST_BYTES, 1 << (size_bytes - 1).bit_length())
        descriptor = os.memfd_create("ortgraph", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size_bytes)
            self._own = mmap.mmap(descriptor, size_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        self._own_bytes = size_bytes
        return descriptor
