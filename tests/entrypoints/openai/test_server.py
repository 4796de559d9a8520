"""`serve` from the port to the last signal, over fake replicas."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.entrypoints.openai.http_rig import (
    HELLO,
    RenderingPreparer,
    TextParts,
    answers,
    say,
    speaking_pipeline,
)
from tests.fakes import FakeStageClient, eventually, fake_config, fake_omni, speaks, text_output
from vllm_omni.config.deploy import ResolvedConfig, ServerLimits
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.openai.server import serve
from vllm_omni.errors import ConfigError, StageStartError

LIMITS = ServerLimits(drain_timeout_s=5.0)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


class Served:
    """A running `serve` and what is behind it."""

    def __init__(self, args: Namespace, thinker: FakeStageClient, limits: ServerLimits) -> None:
        self.url = f"http://127.0.0.1:{args.port}"
        self.thinker = thinker
        self.config: ResolvedConfig = fake_config(speaking_pipeline(), limits=limits)
        self.task = asyncio.create_task(serve(args, self.config))
        self.omni: AsyncOmni | None = None

    async def begin_request(self, http: httpx.AsyncClient) -> asyncio.Task[httpx.Response]:
        """A request that the thinker has got and does not answer."""
        self.thinker.script = None
        running = asyncio.create_task(http.post("/v1/chat/completions", json=say()))
        await eventually(lambda: bool(self.thinker.added))
        return running

    async def is_up(self) -> None:
        async with httpx.AsyncClient(trust_env=False) as http:
            while True:
                assert not self.task.done(), self.task
                try:
                    assert (await http.get(f"{self.url}/health")).status_code == 200
                except httpx.ConnectError:
                    await asyncio.sleep(0.02)
                else:
                    return


@pytest.fixture
def args(text_parts: TextParts) -> Namespace:
    return Namespace(**{**vars(text_parts.args), "host": "127.0.0.1", "port": free_port()})


@asynccontextmanager
async def served(
    args: Namespace,
    text_parts: TextParts,
    monkeypatch: pytest.MonkeyPatch,
    limits: ServerLimits = LIMITS,
) -> AsyncIterator[Served]:
    thinker = FakeStageClient(answers(*HELLO))
    preparer = RenderingPreparer(text_parts.preparer)
    server = Served(args, thinker, limits)

    async def create(*, config: ResolvedConfig, **kwargs: Any) -> AsyncOmni:
        server.omni = fake_omni(
            config.pipeline,
            [[FakeStageClient()], [thinker], [FakeStageClient(speaks())]],
            limits=config.limits,
            preparers={"thinker": preparer, "asr": preparer},
        )
        return server.omni

    monkeypatch.setattr(AsyncOmni, "create", create)
    try:
        await server.is_up()
        yield server
    finally:
        if not server.task.done():
            server.task.cancel()
            await asyncio.gather(server.task, return_exceptions=True)


async def test_the_first_signal_lets_running_requests_finish_and_refuses_new_ones(
    args: Namespace, text_parts: TextParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(args, text_parts, monkeypatch) as server, http_client(server.url) as http:
        running = await server.begin_request(http)
        os.kill(os.getpid(), signal.SIGTERM)
        refused = await refusal(http)
        assert not server.task.done()
        health = await http.get("/health")
        metrics = await http.get("/metrics")
        request_id = server.thinker.added[0].request_id
        server.thinker.emit(text_output(request_id, "late", finished=True))
        response = await running
        await asyncio.wait_for(server.task, 10)

    assert refused.json()["error"]["code"] == "engine_stopped"
    assert refused.headers["retry-after"] == "1"
    assert (health.status_code, metrics.status_code) == (503, 200)
    assert response.json()["choices"][0]["message"]["content"] == "late"
    assert server.omni is not None
    assert not server.omni.is_running
    assert server.thinker.shutdown_calls == 1


async def test_what_does_not_finish_in_time_is_told_so(
    args: Namespace, text_parts: TextParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = ServerLimits(drain_timeout_s=0.3)
    async with (
        served(args, text_parts, monkeypatch, limits) as server,
        http_client(server.url) as http,
    ):
        running = await server.begin_request(http)
        os.kill(os.getpid(), signal.SIGTERM)
        response = await running
        await asyncio.wait_for(server.task, 3)

    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_stopped"


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
async def test_the_second_signal_ends_at_once(
    args: Namespace,
    text_parts: TextParts,
    monkeypatch: pytest.MonkeyPatch,
    second: signal.Signals,
) -> None:
    async with served(args, text_parts, monkeypatch) as server, http_client(server.url) as http:
        running = await server.begin_request(http)
        os.kill(os.getpid(), signal.SIGINT)
        await refusal(http)
        assert not running.done()
        os.kill(os.getpid(), second)
        response = await running
        # Well below the time that running requests would get.
        await asyncio.wait_for(server.task, 3)

    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_stopped"
    assert server.omni is not None
    assert not server.omni.is_running


def http_client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, trust_env=False, timeout=10)


async def refusal(http: httpx.AsyncClient) -> httpx.Response:
    """What a new request is told, once the signal has been taken."""
    while True:
        response = await http.get("/v1/models")
        if response.status_code != 200:
            assert response.status_code == 503
            return response


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # vLLM leaves the unbound socket to the GC
async def test_a_port_in_use_is_one_clear_line(args: Namespace) -> None:
    taken = socket.create_server(("127.0.0.1", args.port))
    with taken, pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{args.port}"):
        await serve(args, fake_config(speaking_pipeline()))
    gc.collect()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # vLLM leaves the unbound socket to the GC
@pytest.mark.parametrize(
    ("field", "value"),
    [("port", 99999), ("port", -1), ("host", "a..b"), ("host", "x" * 300), ("uds", "/x" * 99)],
)
async def test_what_cannot_be_listened_on_is_one_clear_line(
    args: Namespace, field: str, value: object
) -> None:
    setattr(args, field, value)
    with pytest.raises(ConfigError, match=r"^cannot listen on .*: (?!None)."):
        await serve(args, fake_config(speaking_pipeline()))
    gc.collect()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ssl_keyfile": "key.pem"}, "^--ssl-keyfile needs --ssl-certfile$"),
        ({"ssl_ca_certs": "ca.pem"}, "^--ssl-ca-certs needs --ssl-certfile$"),
        ({"enable_ssl_refresh": True}, "^--enable-ssl-refresh needs --ssl-certfile$"),
        ({"ssl_certfile": "nowhere.pem"}, "^--ssl-certfile: no file 'nowhere.pem'$"),
        ({"ssl_certfile": __file__}, f"^no TLS with --ssl-certfile {__file__}: "),
    ],
)
async def test_certificates_are_read_before_any_stage_starts(
    args: Namespace, fields: dict[str, object], message: str
) -> None:
    vars(args).update(fields)
    with pytest.raises(ConfigError, match=message):
        await serve(args, fake_config(speaking_pipeline()))


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # vLLM leaves the unbound socket to the GC
async def test_the_port_is_taken_while_the_stages_start(
    args: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def create(**kwargs: Any) -> AsyncOmni:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    monkeypatch.setattr(AsyncOmni, "create", create)
    first = asyncio.create_task(serve(args, fake_config(speaking_pipeline())))
    await begun.wait()
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{args.port}"):
        await asyncio.wait_for(serve(args, fake_config(speaking_pipeline())), 5)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    gc.collect()


async def test_a_stage_that_fails_at_start_ends_the_server(
    args: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def create(**kwargs: Any) -> AsyncOmni:
        raise StageStartError("stage 'voice': the weights are missing")

    monkeypatch.setattr(AsyncOmni, "create", create)
    with pytest.raises(StageStartError, match="weights are missing"):
        await serve(args, fake_config(speaking_pipeline()))
    socket.create_server(("127.0.0.1", args.port)).close()


async def test_a_signal_while_stages_start_ends_the_server(
    args: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def create(**kwargs: Any) -> AsyncOmni:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError("unreachable")

    monkeypatch.setattr(AsyncOmni, "create", create)
    serving = asyncio.create_task(serve(args, fake_config(speaking_pipeline())))
    await begun.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(serving, 5)

    assert ended.is_set()


async def raw_answer(port: int, *pieces: bytes) -> bytes:
    """What the server says to these bytes before it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return await asyncio.wait_for(reader.read(), 10)
    except ConnectionError:
        return b"closed"
    finally:
        writer.close()


@pytest.mark.parametrize("form", ["one long", "one long in pieces", "many"])
async def test_headers_are_bounded(
    args: Namespace, text_parts: TextParts, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    args.h11_max_incomplete_event_size, args.h11_max_header_count = 100_000, 20
    start = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    pieces = {
        "one long": [start + b"X: " + b"a" * 2_000_000],
        "one long in pieces": [start + b"X: ", *[b"a" * 10_000] * 100],
        "many": [start + b"".join(b"X-%d: a\r\n" % i for i in range(30)) + b"\r\n"],
    }[form]
    fits = [start + b"X: " + b"a" * 50_000 + b"\r\n", b"Y: a\r\n" * 10 + b"\r\n"]
    async with served(args, text_parts, monkeypatch):
        refused = await raw_answer(args.port, *pieces)
        taken = await raw_answer(args.port, *fits)

    assert refused == b"closed" or refused.startswith(b"HTTP/1.1 400")
    assert taken.startswith(b"HTTP/1.1 200")
