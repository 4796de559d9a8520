"""Reports arrive whole, in order, and never hold anybody up for ever."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from vllm_omni.generation import report_stream
from vllm_omni.generation.report_stream import (
    BrokenReportsError,
    ReportReader,
    ReportTooLongError,
    ReportWriter,
)

REPORTS = [
    [b"one part"],
    [b"", b"samples" * 1000, b""],
    [b"x"] * 3000,
    [b"struct", bytes(range(256)) * 20_000, memoryview(b"another")],
    [b"last"],
]


def as_bytes(reports: list[list[memoryview]]) -> list[list[bytes]]:
    return [[bytes(part) for part in parts] for parts in reports]


def packed(*parts: bytes) -> bytes:
    sizes = struct.pack(f"<I{len(parts)}Q", len(parts), *map(len, parts))
    body = sizes + b"".join(parts)
    return struct.pack("<Q", len(body)) + body


@dataclass
class Pair:
    """Both ends in one process."""

    path: str
    reader: ReportReader
    woken: threading.Event = field(default_factory=threading.Event)

    def connect(self) -> ReportWriter:
        writer = ReportWriter(self.path, self.woken.set)
        self.reader.accept()
        return writer

    def connect_raw(self) -> socket.socket:
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        raw.connect(self.path)
        self.reader.accept()
        return raw

    def read_until_over(self) -> list[list[bytes]]:
        """All that comes until the writer is gone, waiting in the kernel."""
        watched = socket.fromfd(self.reader.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)
        watched.settimeout(5)
        got: list[list[bytes]] = []
        with watched:
            while not self.reader.is_over:
                watched.recv(1, socket.MSG_PEEK)
                got += as_bytes(self.reader.receive() or [])
        return got


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    path = str(tmp_path / "reports")
    reader = ReportReader(path)
    yield Pair(path, reader)
    reader.close()


def test_reports_arrive_as_they_were_sent(pair: Pair) -> None:
    writer = pair.connect()
    got: list[list[bytes]] = []
    reading = threading.Thread(target=lambda: got.extend(pair.read_until_over()))
    reading.start()
    for report in REPORTS:
        writer.send(report)
    writer.close()
    reading.join(5)

    assert got == [[bytes(part) for part in report] for report in REPORTS]


def test_what_is_small_is_there_at_once_and_read_in_one_turn(pair: Pair) -> None:
    writer = pair.connect()
    for i in range(3):
        writer.send([b"report", b"%d" % i])

    assert as_bytes(pair.reader.receive() or []) == [[b"report", b"%d" % i] for i in range(3)]
    assert pair.reader.receive() is None
    assert not pair.reader.is_over
    writer.close()


@pytest.mark.parametrize("size", [1, 7, 8, 9, 50, 100_000])
def test_reports_may_be_cut_anywhere(pair: Pair, size: int) -> None:
    reports = [[b"a", b"bc" * 30], [b""], [bytes(70_000)], [b"end"]]
    stream = b"".join(packed(*report) for report in reports)
    raw = pair.connect_raw()
    got: list[list[bytes]] = []
    for begin in range(0, len(stream), size):
        raw.sendall(stream[begin : begin + size])
        got += as_bytes(pair.reader.receive() or [])
    while (more := pair.reader.receive()) is not None:
        got += as_bytes(more)

    assert got == reports
    raw.close()


def test_a_writer_that_dies_within_a_report_leaves_those_before_it(pair: Pair) -> None:
    raw = pair.connect_raw()
    raw.sendall(packed(b"whole") + packed(bytes(1000))[:500])
    raw.close()

    assert pair.read_until_over() == [[b"whole"]]
    assert pair.reader.receive() is None


def test_a_turn_of_the_reader_is_bounded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_stream, "_MAX_BYTES_A_TURN", 50_000)
    writer = pair.connect()
    report = [bytes(150_000)]
    writer.send(report)
    turns = []
    while (reports := pair.reader.receive()) is not None:
        turns.append(as_bytes(reports))

    assert turns[0] == []
    assert [one for turn in turns for one in turn] == [report]
    writer.close()


def test_parts_cannot_be_changed(pair: Pair) -> None:
    writer = pair.connect()
    writer.send([bytes(100_000), b"small"])

    (parts,) = pair.reader.receive() or []

    assert all(part.readonly for part in parts)
    writer.close()


@pytest.mark.parametrize(
    "stream",
    [
        struct.pack("<Q", report_stream.MAX_REPORT_BYTES + 1),
        b"\xff" * 100,
        struct.pack("<Q", 2) + b"ab",
        struct.pack("<QI", 4, 3),
        struct.pack("<QIQ", 12, 1, 5),
        struct.pack("<QIQ", 20, 1, 5) + bytes(8),
    ],
)
def test_what_is_no_report_is_told(pair: Pair, stream: bytes) -> None:
    raw = pair.connect_raw()
    raw.sendall(stream)

    with pytest.raises(BrokenReportsError):
        pair.reader.receive()
    raw.close()


def test_a_report_that_is_too_long_is_not_begun(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_stream, "MAX_REPORT_BYTES", 1000)
    writer = pair.connect()
    with pytest.raises(ReportTooLongError, match="are more than the 1000 that can be sent"):
        writer.send([bytes(500), bytes(500)])
    writer.send([b"short"])

    assert as_bytes(pair.reader.receive() or []) == [[b"short"]]
    writer.close()


def test_a_reader_that_is_behind_fills_the_writer_which_does_not_wait(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_stream, "MAX_UNSENT_BYTES", 1_000_000)
    writer = pair.connect()
    num_sent = 0
    while not writer.is_full:
        writer.send([b"%d" % num_sent, bytes(100_000)])
        num_sent += 1
        assert num_sent < 1000
    assert not pair.woken.is_set()

    got: list[list[bytes]] = []
    reading = threading.Thread(target=lambda: got.extend(pair.read_until_over()))
    reading.start()
    assert pair.woken.wait(5)
    assert not writer.is_full
    writer.close()
    reading.join(5)

    assert [parts[0] for parts in got] == [b"%d" % i for i in range(num_sent)]


def test_small_reports_fill_the_writer_too(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_stream, "MAX_UNSENT_REPORTS", 10)
    writer = pair.connect()
    num_sent = 0
    while not writer.is_full:
        writer.send([bytes(1000)])
        num_sent += 1
        assert num_sent < 100_000
    pair.reader.close()  # nobody reads: what is left goes nowhere
    assert pair.woken.wait(5)
    writer.close()


def test_closing_waits_for_what_leaves_and_not_for_ever(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_stream, "LINGER_S", 0.05)
    writer = pair.connect()
    writer.send([bytes(20_000_000)])
    begun_s = time.monotonic()
    writer.close()

    assert time.monotonic() - begun_s < 2.0
    assert pair.read_until_over() == []


def test_a_reader_that_is_gone_harms_nobody(pair: Pair) -> None:
    writer = pair.connect()
    pair.reader.close()
    for _ in range(3):
        writer.send([b"to nobody", bytes(100_000)])

    assert not writer.is_full
    writer.close()


def test_nobody_connects_after_the_writer(pair: Pair) -> None:
    writer = pair.connect()
    with pytest.raises(FileNotFoundError):
        ReportWriter(pair.path, pair.woken.set)
    writer.close()


def test_a_writer_that_did_not_connect_is_not_awaited(pair: Pair) -> None:
    with pytest.raises(BlockingIOError):
        pair.reader.accept()
    assert pair.reader.receive() is None
