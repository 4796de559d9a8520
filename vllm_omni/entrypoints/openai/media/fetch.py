"""Fetch media that a request names by URL, when the operator allows it.

Every name is resolved here, all its addresses are checked, and the connection goes to those
addresses: nothing resolves a second time. Redirects are followed by hand, each checked anew.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Final
from urllib.parse import urljoin

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from vllm_omni.entrypoints.openai.media.addresses import check_url, is_public, not_public
from vllm_omni.errors import BadRequestError, ConfigError

MAX_REDIRECTS: Final = 3
FETCH_TIMEOUT_S: Final = 10.0
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Host name and port to addresses."""


async def resolve_host(host: str, port: int) -> Sequence[str]:
    """Addresses of a host, by the system's resolver."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


class MediaFetcher:
    """Fetches under one policy: `deny`, `public`, or a comma-separated list of host names."""

    def __init__(
        self,
        policy: str,
        *,
        resolve: Resolve = resolve_host,
        is_allowed: Callable[[str], bool] = is_public,
        timeout_s: float = FETCH_TIMEOUT_S,
    ) -> None:
        names = [name.strip().lower() for name in policy.split(",") if name.strip()]
        if not names:
            raise ConfigError("limits.media_fetch must be deny, public or a list of host names")
        self._denied = names == ["deny"]
        self._hosts = None if self._denied or names == ["public"] else frozenset(names)
        self._resolve = resolve
        self._is_allowed = is_allowed
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    def check(self, url: str, field: str) -> None:
        """Refuse a URL before anything is done for it."""
        if self._denied:
            raise BadRequestError(
                "this server fetches no media; send a data URL instead", field=field
            )
        host = (check_url(url, field).hostname or "").lower()
        if self._hosts is not None and host not in self._hosts:
            raise BadRequestError("this server does not fetch from that host", field=field)

    async def fetch(self, url: str, max_bytes: int, field: str) -> bytes:
        """The body behind `url`.

        Raises:
            BadRequestError: the URL is not allowed, does not answer, or answers too much.
        """
        connector = aiohttp.TCPConnector(
            resolver=_CheckedResolver(self._resolve, self._is_allowed), use_dns_cache=False
        )
        try:
            async with aiohttp.ClientSession(
                connector=connector,
                timeout=self._timeout,
                trust_env=False,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Accept-Encoding": "identity", "User-Agent": "vllm-omni"},
            ) as session:
                return await self._follow(session, url, max_bytes, field)
        except _NotPublicError:
            raise not_public(field) from None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as exc:
            if isinstance(exc, BadRequestError):
                raise
            raise BadRequestError("the URL could not be fetched", field=field) from None

    async def _follow(
        self, session: aiohttp.ClientSession, url: str, max_bytes: int, field: str
    ) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            self.check(url, field)
            async with session.get(url, allow_redirects=False) as response:
                if response.status in _REDIRECTS:
                    url = urljoin(url, response.headers.get("Location", ""))
                    continue
                if response.status != 200:
                    raise BadRequestError(
                        f"the URL answered with status {response.status}", field=field
                    )
                return await _read_bounded(response, max_bytes, field)
        raise BadRequestError(f"the URL redirects more than {MAX_REDIRECTS} times", field=field)


async def _read_bounded(response: aiohttp.ClientResponse, max_bytes: int, field: str) -> bytes:
    if (response.content_length or 0) > max_bytes:
        raise BadRequestError(f"the URL holds more than {max_bytes} bytes", field=field)
    data = bytearray()
    async for part in response.content.iter_chunked(64 * 1024):
        data += part
        if len(data) > max_bytes:
            raise BadRequestError(f"the URL holds more than {max_bytes} bytes", field=field)
    return bytes(data)


class _NotPublicError(aiohttp.ClientError):
    """A name resolved to an address that is not allowed."""


class _CheckedResolver(AbstractResolver):
    """Resolves once; what it returns is what aiohttp connects to."""

    def __init__(self, resolve: Resolve, is_allowed: Callable[[str], bool]) -> None:
        self._resolve = resolve
        self._is_allowed = is_allowed

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        addresses = await self._resolve(host, port)
        if not addresses or not all(self._is_allowed(address) for address in addresses):
            raise _NotPublicError(host)
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in addresses
        ]

    async def close(self) -> None:
        pass
