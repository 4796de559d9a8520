"""How reports travel from a replica to the orchestrator: one Unix socket, no thread in between.

A report is several parts; each is written from where it lies. In a stream socket the bytes are the
reader's as soon as they are written, and stay so when the writer dies. Nothing here blocks a loop:
what the kernel does not take at once is written by a thread, and a reader takes what is there.

    length of what follows (8 bytes), number of parts (4), their lengths (8 each), the parts
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

logger = logging.getLogger(__name__)

MAX_REPORT_BYTES = 4 << 30
"""A longer report is not written; a length above it is none."""
MAX_UNSENT_REPORTS = 1024
MAX_UNSENT_BYTES = 64 << 20
"""With so much unsent the writer's owner makes no more."""
LINGER_S: Final = 0.5
"""What is unsent when the writer is closed has so long to leave."""
_BUFFER_BYTES: Final = 4 << 20
"""Asked of the kernel, which gives what its own limit allows."""
_READ_BYTES: Final = 64 << 10
_MAX_BYTES_A_TURN = 256 << 10
"""Of a reader's loop: a tenth of a millisecond."""
_MAX_PARTS_A_CALL: Final = 1024
_LENGTH: Final = struct.Struct("<Q")
_COUNT: Final = struct.Struct("<I")


class ReportTooLongError(ValueError):
    """It cannot be sent."""


class BrokenReportsError(ValueError):
    """What was read is no report; where the next one begins is not known."""


class ReportWriter:
    """The replica's end. `send` and `close` are called by one thread."""

    def __init__(self, path: str, wake: Callable[[], None]) -> None:
        """Connect to the reader. `wake` is called, in another thread, once it is full no more."""
        self._wake = wake
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        try:
            self._socket.connect(path)
        except OSError:
            self._socket.close()
            raise
        self._changed = threading.Condition()
        self._unsent: deque[list[memoryview]] = deque()
        """The first one is being written by the thread."""
        self._num_unsent_bytes = 0
        self._is_closing = False
        self._is_broken = False
        self._thread = threading.Thread(target=self._write_unsent, name="reports", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """The reader is that far behind."""
        return len(self._unsent) >= MAX_UNSENT_REPORTS or self._num_unsent_bytes >= MAX_UNSENT_BYTES

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send a report, or see that it is sent after those before it. What it is made of must
        not be changed.

        Raises:
            ReportTooLongError: nothing of it was sent.
        """
        views = [memoryview(part).cast("B") for part in parts]
        sizes = [len(view) for view in views]
        body_bytes = _COUNT.size + _LENGTH.size * len(sizes) + sum(sizes)
        if body_bytes > MAX_REPORT_BYTES:
            raise ReportTooLongError(
                f"{body_bytes} bytes at once are more than the {MAX_REPORT_BYTES} that can be sent"
            )
        head = struct.pack(f"<QI{len(sizes)}Q", body_bytes, len(sizes), *sizes)
        rest = [memoryview(head), *views]
        with self._changed:
            if not self._unsent:
                rest = self._written(rest, socket.MSG_DONTWAIT)
            if rest and not self._is_broken:
                self._unsent.append(rest)
                self._num_unsent_bytes += _num_bytes(rest)
                self._changed.notify_all()

    def close(self) -> None:
        """Wait a moment until everything is sent, then give the socket back."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(LINGER_S)
        with contextlib.suppress(OSError):  # the reader is gone
            self._socket.shutdown(socket.SHUT_RDWR)  # ends a write that waits
        self._thread.join()
        self._socket.close()

    def _write_unsent(self) -> None:
        while True:
            with self._changed:
                while not self._unsent:
                    if self._is_closing:
                        return
                    self._changed.wait()
                rest = self._unsent[0]
            num_bytes = _num_bytes(rest)
            while rest:
                rest = self._written(rest)
            with self._changed:
                was_full = self.is_full
                self._unsent.popleft()
                self._num_unsent_bytes -= num_bytes
                has_room = was_full and not self.is_full
            if has_room:
                self._wake()

    def _written(self, parts: list[memoryview], flags: int = 0) -> list[memoryview]:
        """Write once; what of it is still to write."""
        if self._is_broken:
            return []
        try:
            num_bytes = self._socket.sendmsg(parts[:_MAX_PARTS_A_CALL], (), flags)
        except BlockingIOError:
            return parts
        except OSError as error:
            # Nobody will ever read: this process is about to be told to end.
            self._is_broken = True
            logger.debug("reports are not read any more: %s", error)
            return []
        return _without(parts, num_bytes)


class ReportReader:
    """The orchestrator's end. Never blocks."""

    def __init__(self, path: str) -> None:
        """Let a writer connect there. The folder is private: nobody else can."""
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(1)
        self._listener.setblocking(False)
        self._socket: socket.socket | None = None
        self._begun = b""
        """The first bytes of a report, too few to tell its length."""
        self._body: memoryview | None = None
        """Of a report that is not here as a whole."""
        self._num_body_bytes = 0
        """How much of it is here."""
        self.is_over = False
        """The writer is gone and everything was read."""

    def accept(self) -> None:
        """Take the writer, which has connected, and nobody else any more.

        Raises:
            BlockingIOError: it has not connected.
        """
        self._socket, _ = self._listener.accept()
        self._socket.setblocking(False)
        self._stop_listening()

    def fileno(self) -> int:
        """Readable when there is something to receive, or the end."""
        return self._socket.fileno() if self._socket is not None else -1

    def receive(self) -> list[list[memoryview]] | None:
        """The reports that are complete now, perhaps none yet; None: there is nothing to read.

        Reads to the end of a report, or as much as may be done in one turn of a loop.

        Raises:
            BrokenReportsError: it is none.
        """
        reports: list[list[memoryview]] = []
        num_bytes = 0
        while num_bytes < _MAX_BYTES_A_TURN:
            num_read = self._read(reports, _MAX_BYTES_A_TURN - num_bytes)
            if not num_read:
                return reports if num_bytes else None
            num_bytes += num_read
            if self._body is None and not self._begun:
                break
        return reports

    def close(self) -> None:
        """Give the sockets back. Repeatable."""
        self._stop_listening()
        if self._socket is not None:
            self._socket.close()

    def _stop_listening(self) -> None:
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    def _read(self, reports: list[list[memoryview]], max_bytes: int) -> int:
        """Read once and add what is complete to `reports`; how many bytes that were."""
        if self._socket is None or self.is_over:
            return 0
        try:
            if self._body is None:
                data = self._socket.recv(_READ_BYTES)
                num_read = len(data)
                self._split(self._begun + data if self._begun else data, reports)
            else:
                # Unbounded it would go on for as long as the writer writes.
                begin = self._num_body_bytes
                num_read = self._socket.recv_into(self._body[begin : begin + max_bytes])
                self._num_body_bytes += num_read
                if self._num_body_bytes == len(self._body):
                    reports.append(_parts(self._body))
                    self._body = None
        except BlockingIOError:
            return 0
        except ConnectionError:
            num_read = 0
        self.is_over = not num_read
        return num_read

    def _split(self, data: bytes, reports: list[list[memoryview]]) -> None:
        """Cut reports out of what was read; of the last one there may be a part."""
        view = memoryview(data)
        while len(view) >= _LENGTH.size:
            (body_bytes,) = _LENGTH.unpack_from(view)
            if body_bytes > MAX_REPORT_BYTES:
                raise BrokenReportsError(f"a report of {body_bytes} bytes")
            view = view[_LENGTH.size :]
            if len(view) < body_bytes:
                self._body = _new_buffer(body_bytes)
                self._body[: len(view)] = view
                self._num_body_bytes = len(view)
                view = view[:0]
                break
            reports.append(_parts(view[:body_bytes]))
            view = view[body_bytes:]
        self._begun = bytes(view)


def _num_bytes(parts: list[memoryview]) -> int:
    return sum(len(part) for part in parts)


def _without(parts: list[memoryview], num_bytes: int) -> list[memoryview]:
    """The parts without their first bytes."""
    for index, part in enumerate(parts):
        if num_bytes < len(part):
            return [part[num_bytes:], *parts[index + 1 :]]
        num_bytes -= len(part)
    return []


def _new_buffer(num_bytes: int) -> memoryview:
    """Memory that nobody has touched: its pages come with what is read into them."""
    import numpy as np

    return np.empty(num_bytes, np.uint8).data


def _parts(body: memoryview) -> list[memoryview]:
    """The parts of a report, without a copy and read-only."""
    if len(body) < _COUNT.size:
        raise BrokenReportsError("a report without a number of parts")
    (num_parts,) = _COUNT.unpack_from(body)
    begin = _COUNT.size + _LENGTH.size * num_parts
    if len(body) < begin:
        raise BrokenReportsError(f"{num_parts} parts in {len(body)} bytes")
    parts = []
    for size in struct.unpack_from(f"<{num_parts}Q", body, _COUNT.size):
        parts.append(body[begin : begin + size].toreadonly())
        begin += size
    if begin != len(body):
        raise BrokenReportsError(f"parts of {begin} bytes in {len(body)}")
    return parts
