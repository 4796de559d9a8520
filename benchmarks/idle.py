"""How much processor time a server takes while nothing happens.

    python benchmarks/idle.py [--model DIR] [--seconds 30] [--parked 64] [--json]

Twice: without a request, and with requests that wait: each asks for speech and then does not read
it, so that its audio is made, fills the socket, and the rest of it waits in the server. Shares are
of one core, by `/proc/PID/stat`, for each process of the server.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tqdm import tqdm

from benchmarks.served import Server, ServerError, cpu_seconds, serve, title

QUIET_SHARE: Final = 0.02
QUIET_TIMEOUT_S: Final = 300.0
SETTLE_S: Final = 5.0
MIN_HELD_BYTES: Final = 500_000
TEXT: Final = (
    "This is a long text, and nobody listens to it. It goes on for a while, because the audio of "
    "a short one would fit into the buffers of a socket, and then the request would be over. "
) * 3


def shares(server: Server, seconds: float, label: str) -> dict[str, float]:
    """Share of one core that each process took over the next seconds, by its title."""
    before = {pid: cpu_seconds(pid) for pid in server.processes()}
    started_s = time.monotonic()
    for _ in tqdm(range(round(seconds)), desc=f"{label:<28}", bar_format="{desc}{bar}| {elapsed}"):
        time.sleep(1.0)
        server.check()
    elapsed_s = time.monotonic() - started_s
    taken: dict[str, float] = {}
    for pid, spent_s in before.items():
        name = f"{title(pid)} [{pid}]"
        taken[name] = (cpu_seconds(pid) - spent_s) / elapsed_s
    return taken


def park(stack: ExitStack, server: Server, count: int) -> list[socket.socket]:
    """Open requests whose answers are not read."""
    parked = []
    model = json.loads(server.get("/v1/models"))["data"][0]["id"]
    body = json.dumps(
        {
            "model": model,
            "input": TEXT,
            "voice": "default",
            "response_format": "pcm",
            "stream_format": "audio",
        }
    ).encode()
    head = (
        f"POST /v1/audio/speech HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    for _ in tqdm(range(count), desc=f"{'parking requests':<28}", bar_format="{desc}{bar}|"):
        sock = stack.enter_context(socket.socket())
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(head + body)
        status = sock.recv(12).decode(errors="replace")
        if not status.endswith("200"):
            raise ServerError(f"a request to be parked was answered {status!r}")
        parked.append(sock)
    return parked


def check_held(parked: list[socket.socket]) -> None:
    """The server still has audio for a client that reads at last: it was waiting with it."""
    sock = parked[-1]
    sock.settimeout(10.0)
    num_bytes = 0
    while num_bytes < MIN_HELD_BYTES:
        data = sock.recv(65536)
        if not data:
            raise ServerError(f"a parked request held {num_bytes} bytes only: it was over")
        num_bytes += len(data)


def wait_until_quiet(server: Server) -> None:
    """Until the audio of the parked requests is made as far as it goes."""
    started_s = time.monotonic()
    with tqdm(desc="waiting for quiet", bar_format="{desc:<28}{elapsed}") as bar:
        while time.monotonic() - started_s < QUIET_TIMEOUT_S:
            before = {pid: cpu_seconds(pid) for pid in server.processes()}
            time.sleep(2.0)
            bar.update()
            if sum(cpu_seconds(pid) - spent for pid, spent in before.items()) < 2.0 * QUIET_SHARE:
                return
    raise ServerError(f"the server was not quiet within {QUIET_TIMEOUT_S:.0f} s")


def measure(server: Server, seconds: float, parked: int) -> dict[str, Any]:
    time.sleep(SETTLE_S)
    result: dict[str, Any] = {"idle": shares(server, seconds, "idle")}
    if parked:
        with ExitStack() as stack:
            held = park(stack, server, parked)
            wait_until_quiet(server)
            result["parked"] = shares(server, seconds, f"{parked} parked")
            check_held(held)
    return result


def show(result: dict[str, Any]) -> None:
    for name in result["idle"]:
        parked = result.get("parked", {}).get(name)
        text = "" if parked is None else f"{100 * parked:8.2f} %"
        print(f"{name:<72}{100 * result['idle'][name]:8.2f} %{text}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path(".demo/smol_voice"))
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="for the server's log")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--parked", type=int, default=64)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    arguments, server_arguments = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    log = arguments.out / "idle_server.log"
    try:
        with serve(arguments.model, log, server_arguments) as server:
            result = measure(server, arguments.seconds, arguments.parked)
    except ServerError as error:
        print(f"idle: {error}\nthe server's log: {log}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    show(result)
    if arguments.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
