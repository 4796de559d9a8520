"""How fast chunks go from one replica's process to another's.

    python benchmarks/connectors.py [--json]

Two real processes on this host. Latency is half of a round trip of an 8 KiB chunk between the
worker threads of both sides: push, the other connector's thread hands the frame to its worker,
which pushes it back. Throughput is 4 MiB chunks, copied in by the sender's push and copied out by
the receiver. The same is done with what Python users have at hand: pickled arrays in
`multiprocessing.Pipe` and `multiprocessing.Queue`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import platform
import queue
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from typing import Any

import numpy as np

from vllm_omni.distributed.omni_connectors.base import Frame
from vllm_omni.distributed.omni_connectors.factory import Connector, open_connector
from vllm_omni.distributed.run_directory import RunDirectory

SMALL_BYTES = 8 * 1024
LARGE_BYTES = 4 * 1024 * 1024
IN_FLIGHT = 4
"""Chunks of the throughput run that are not acknowledged yet."""
WARM_UP = 100


class Worker:
    """One side: a connector, and a worker thread (this one) that its frames are handed to."""

    def __init__(self, connector: Connector, peer: str) -> None:
        self.sender = connector.sender
        self.receiver = connector.receiver
        self.frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self.peer = peer

    def listen(self, stream: str) -> None:
        self.receiver.subscribe(stream, self.frames.put)

    def speak(self, stream: str) -> None:
        self.sender.open(self.peer, stream)

    def next(self) -> Frame:
        frame = self.frames.get(timeout=60)
        assert frame.end is None, f"stream {frame.stream} ended: {frame.end} {frame.error}"
        return frame


def echo_side(ready: Pipe, bind: str, peer: str, rounds: int, chunks: int) -> None:
    """The other process: echoes the small chunks, copies the large ones out."""
    connector = open_connector("echo/0", bind)
    worker = Worker(connector, peer)
    worker.listen("ping")
    worker.listen("bulk")
    for stream in ("pong", "ack"):
        worker.speak(stream)
    ready.send(connector.address)
    for _ in range(rounds):
        frame = worker.next()
        worker.sender.push("pong", frame.payload, frame.meta)
        frame.release()
    into = np.empty(LARGE_BYTES, np.uint8)
    for _ in range(chunks):
        frame = worker.next()
        np.copyto(into, np.frombuffer(frame.payload, np.uint8))
        frame.release()
        worker.sender.push("ack", into[:1].tobytes())
    for stream in ("pong", "ack"):
        worker.sender.end(stream)
    assert [worker.frames.get(timeout=60).end for _ in range(2)] == ["stop", "stop"]
    connector.close()


def measure_connector(rounds: int, chunks: int) -> tuple[list[float], float]:
    """Seconds of each round trip, and bytes per second of the large chunks."""
    directory = RunDirectory.create("bench")
    connector = open_connector("bench/0", directory.ipc("a"))
    worker = Worker(connector, directory.ipc("b"))
    context = mp.get_context("spawn")
    ready, theirs = context.Pipe()
    arguments = (theirs, directory.ipc("b"), connector.address, rounds + WARM_UP, chunks + WARM_UP)
    process = context.Process(target=echo_side, args=arguments)
    process.start()
    worker.listen("pong")
    worker.listen("ack")
    ready.recv()
    for stream in ("ping", "bulk"):
        worker.speak(stream)
    small = np.random.default_rng(0).bytes(SMALL_BYTES)
    meta = {"dtype": "float32", "shape": [SMALL_BYTES // 4]}

    def round_trip() -> None:
        worker.sender.push("ping", small, meta)
        worker.next().release()

    latencies = timed(round_trip, rounds)
    large = np.random.default_rng(0).integers(0, 255, LARGE_BYTES, np.uint8)

    def send(num_chunks: int) -> None:
        for i in range(num_chunks):
            worker.sender.push("bulk", large.data, meta)
            if i >= IN_FLIGHT:
                worker.next().release()
        for _ in range(min(IN_FLIGHT, num_chunks)):
            worker.next().release()

    send(WARM_UP)
    rate = bytes_per_s(send, chunks)
    for stream in ("ping", "bulk"):
        worker.sender.end(stream)
    process.join(60)
    connector.close()
    directory.remove()
    return latencies, rate


def pipe_echo(pipe: Pipe, rounds: int, chunks: int) -> None:
    for _ in range(rounds):
        pipe.send(pipe.recv())
    into = np.empty(LARGE_BYTES, np.uint8)
    for _ in range(chunks):
        np.copyto(into, pipe.recv())
        pipe.send(0)


def queue_echo(inbox: mp.Queue[Any], outbox: mp.Queue[Any], rounds: int, chunks: int) -> None:
    for _ in range(rounds):
        outbox.put(inbox.get())
    into = np.empty(LARGE_BYTES, np.uint8)
    for _ in range(chunks):
        np.copyto(into, inbox.get())
        outbox.put(0)


def measure_pipe(rounds: int, chunks: int) -> tuple[list[float], float]:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=pipe_echo, args=(theirs, rounds + WARM_UP, chunks + WARM_UP))
    process.start()
    return measure_plain(ours.send, ours.recv, process, rounds, chunks)


def measure_queue(rounds: int, chunks: int) -> tuple[list[float], float]:
    context = mp.get_context("spawn")
    there: mp.Queue[Any] = context.Queue()
    back: mp.Queue[Any] = context.Queue()
    arguments = (there, back, rounds + WARM_UP, chunks + WARM_UP)
    process = context.Process(target=queue_echo, args=arguments)
    process.start()
    return measure_plain(there.put, back.get, process, rounds, chunks)


def measure_plain(
    send: Callable[[Any], None],
    receive: Callable[[], Any],
    process: Any,
    rounds: int,
    chunks: int,
) -> tuple[list[float], float]:
    small = np.zeros(SMALL_BYTES // 4, np.float32)
    large = np.random.default_rng(0).integers(0, 255, LARGE_BYTES, np.uint8)

    def round_trip() -> None:
        send(small)
        receive()

    def send_all(num_chunks: int) -> None:
        for i in range(num_chunks):
            send(large)
            if i >= IN_FLIGHT:
                receive()
        for _ in range(min(IN_FLIGHT, num_chunks)):
            receive()

    latencies = timed(round_trip, rounds)
    send_all(WARM_UP)
    rate = bytes_per_s(send_all, chunks)
    process.join(60)
    return latencies, rate


def timed(call: Callable[[], None], rounds: int) -> list[float]:
    for _ in range(WARM_UP):
        call()
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return seconds


def bytes_per_s(send: Callable[[int], None], chunks: int) -> float:
    begin = time.perf_counter()
    send(chunks)
    return chunks * LARGE_BYTES / (time.perf_counter() - begin)


def summary(latencies: list[float], rate: float) -> dict[str, float]:
    cuts = statistics.quantiles(latencies, n=100)
    return {
        "one_way_ms_p50": round(cuts[49] / 2 * 1e3, 4),
        "one_way_ms_p99": round(cuts[98] / 2 * 1e3, 4),
        "gib_per_s": round(rate / 2**30, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3000, help="round trips of 8 KiB")
    parser.add_argument("--chunks", type=int, default=500, help="chunks of 4 MiB")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    results = {
        name: summary(*measure(options.rounds, options.chunks))
        for name, measure in (
            ("connector", measure_connector),
            ("pipe", measure_pipe),
            ("queue", measure_queue),
        )
    }
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"{'':12}{'8 KiB p50 ms':>14}{'p99 ms':>10}{'4 MiB GiB/s':>14}")
    for name, row in results.items():
        p50, p99, rate = row.values()
        print(f"{name:12}{p50:14.3f}{p99:10.3f}{rate:14.2f}")
    ours, best = (
        results["connector"],
        max(results["pipe"]["gib_per_s"], results["queue"]["gib_per_s"]),
    )
    ratio = ours["gib_per_s"] / best
    print(f"4 MiB against the better alternative: {ratio:.1f} times")
    if options.json:
        flat = {
            f"{name}_{key}": value for name, row in results.items() for key, value in row.items()
        }
        print(json.dumps({**flat, "throughput_ratio": round(ratio, 2)}))


if __name__ == "__main__":
    main()
