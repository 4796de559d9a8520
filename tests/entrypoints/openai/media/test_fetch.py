"""The fetcher leads nowhere but to public addresses, and bounds what it takes."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from vllm_omni.entrypoints.openai.media.addresses import is_public
from vllm_omni.entrypoints.openai.media.fetch import MediaFetcher
from vllm_omni.errors import BadRequestError, ConfigError

FIELD = "messages[0].content[0].audio_url.url"
NOT_PUBLIC = [
    "127.0.0.1",
    "127.8.8.8",
    "0.0.0.0",
    "10.0.0.1",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "192.0.0.1",
    "198.18.0.1",
    "203.0.113.5",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::ffff:127.0.0.1",
    "::ffff:8.8.8.8",
    "::127.0.0.1",
    "fe80::1",
    "fe80::1%eth0",
    "fc00::1",
    "fd12::1",
    "ff02::1",
    "2001:db8::1",
    "2002:7f00:1::",
    "2001:0:1::1",
    "64:ff9b::7f00:1",
    "not an address",
]


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111"])
def test_addresses_that_are(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/a.wav",
        "http://[::1]/a.wav",
        "http://[::ffff:127.0.0.1]/a.wav",
        "http://[fe80::1%25eth0]/a.wav",
        "http://169.254.169.254/latest/meta-data",
        "http://2130706433/",
        "http://0x7f000001/",
        "http://0x7f.1/",
        "http://0177.0.0.1/",
        "http://127.1/",
        "http://0/",
        "http://127.0.0.1./",
        "http://user:secret@example.com/",
        "http://user@example.com/",
        "http://example.com\\@127.0.0.1/",
        "http://exa mple.com/",
        "http://example.com/\r\nHost: x",
        "http:///a.wav",
        "http://-bad-.com/",
        "http://example.com:99999/",
        "http://[::1/",
        "http://ex\u2024ample.com/",
        "ftp://example.com/a.wav",
        "file:///etc/passwd",
        "gopher://example.com/",
        "//example.com/a.wav",
        "a.wav",
        "",
        "http://example.com/" + "a" * 5000,
    ],
)
def test_urls_that_are_refused_before_anything_is_done(url: str) -> None:
    with pytest.raises(BadRequestError) as error:
        MediaFetcher("public").check(url, FIELD)
    assert error.value.field == FIELD
    assert url == "" or url not in str(error.value)


async def test_nothing_is_fetched_by_default() -> None:
    with pytest.raises(BadRequestError, match="fetches no media"):
        await MediaFetcher("deny").fetch("http://8.8.8.8/", 100, FIELD)


async def test_only_listed_hosts_are_fetched() -> None:
    fetcher = MediaFetcher("media.example, cdn.example")

    fetcher.check("https://CDN.example/a.wav", FIELD)
    with pytest.raises(BadRequestError, match="that host"):
        fetcher.check("https://sub.cdn.example/a.wav", FIELD)


def test_an_empty_policy_is_a_mistake_of_the_operator() -> None:
    with pytest.raises(ConfigError):
        MediaFetcher(" , ")


@pytest.mark.parametrize(
    "addresses", [["127.0.0.1"], ["8.8.8.8", "10.0.0.1"], ["::ffff:127.0.0.1"], []]
)
async def test_every_resolved_address_must_be_public(addresses: list[str]) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return addresses

    with pytest.raises(BadRequestError, match="public address"):
        await MediaFetcher("public", resolve=resolve).fetch("http://evil.example/", 100, FIELD)


@asynccontextmanager
async def web_server(handler: Callable[..., object]) -> AsyncIterator[int]:
    app = web.Application()
    app.router.add_get("/{tail:.*}", handler)  # type: ignore[arg-type]
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def local(timeout_s: float = 5.0, resolved: list[str] | None = None) -> MediaFetcher:
    """A fetcher for which `media.example` is this machine, and this machine is allowed."""

    async def resolve(host: str, port: int) -> list[str]:
        if resolved is not None:
            resolved.append(host)
        return ["127.0.0.1"] if host == "media.example" else ["10.0.0.1"]

    return MediaFetcher(
        "public",
        resolve=resolve,
        is_allowed=lambda address: address == "127.0.0.1",
        timeout_s=timeout_s,
    )


async def test_a_name_is_resolved_once_and_its_address_is_connected_to() -> None:
    async def handler(request: web.Request) -> web.Response:
        assert request.host.startswith("media.example")
        return web.Response(body=b"sound")

    resolved: list[str] = []
    async with web_server(handler) as port:
        url = f"http://media.example:{port}/a.wav"
        assert await local(resolved=resolved).fetch(url, 100, FIELD) == b"sound"
    assert resolved == ["media.example"]


@pytest.mark.parametrize(
    "target",
    [
        "http://inside.example/",
        "http://127.0.0.1/",
        "http://169.254.169.254/",
        "file:///etc/passwd",
        "http://[::1]/",
    ],
)
async def test_redirects_are_checked_like_the_first_url(target: str) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": target})

    async with web_server(handler) as port:
        with pytest.raises(BadRequestError):
            await local().fetch(f"http://media.example:{port}/", 100, FIELD)


async def test_redirects_are_followed_a_few_times() -> None:
    async def handler(request: web.Request) -> web.Response:
        num = int(request.path[1:])
        if num == 0:
            return web.Response(body=b"sound")
        return web.Response(status=307, headers={"Location": f"/{num - 1}"})

    async with web_server(handler) as port:
        assert await local().fetch(f"http://media.example:{port}/3", 100, FIELD) == b"sound"
        with pytest.raises(BadRequestError, match="redirects"):
            await local().fetch(f"http://media.example:{port}/4", 100, FIELD)


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_size_is_bounded_with_and_without_a_length(is_chunked: bool) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        if not is_chunked:
            return web.Response(body=bytes(101))
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(101):
            await response.write(b"x")
        return response

    async with web_server(handler) as port:
        with pytest.raises(BadRequestError, match="more than 100 bytes"):
            await local().fetch(f"http://media.example:{port}/", 100, FIELD)


async def test_nothing_is_unpacked() -> None:
    packed = gzip.compress(bytes(10_000_000))

    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=packed, headers={"Content-Encoding": "gzip"})

    async with web_server(handler) as port:
        data = await local().fetch(f"http://media.example:{port}/", 100_000, FIELD)
    assert data == packed


async def test_time_is_bounded() -> None:
    released = asyncio.Event()

    async def handler(request: web.Request) -> web.Response:
        await released.wait()
        return web.Response()

    async with web_server(handler) as port:
        with pytest.raises(BadRequestError, match="could not be fetched"):
            await local(timeout_s=0.2).fetch(f"http://media.example:{port}/", 100, FIELD)
        released.set()


@pytest.mark.parametrize("status", [204, 404, 500])
async def test_other_answers_are_errors(status: int) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=status)

    async with web_server(handler) as port:
        with pytest.raises(BadRequestError, match=str(status)):
            await local().fetch(f"http://media.example:{port}/", 100, FIELD)


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")

    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=b"sound")

    async with web_server(handler) as port:
        assert await local().fetch(f"http://media.example:{port}/", 100, FIELD) == b"sound"
