"""Which network addresses a client may make this server connect to: public ones, nothing else."""

from __future__ import annotations

import ipaddress
import re
from typing import Final
from urllib.parse import SplitResult, urlsplit

from vllm_omni.errors import BadRequestError

_TRANSLATED: Final = tuple(
    # Prefixes that carry an IPv4 address inside: 6to4, Teredo, NAT64, IPv4-compatible.
    ipaddress.ip_network(net)
    for net in ("2002::/16", "2001::/32", "64:ff9b::/96", "64:ff9b:1::/48", "::/96")
)
_NUMERIC_HOST: Final = re.compile(r"(0[xX][0-9a-fA-F]*|\d+)(\.(0[xX][0-9a-fA-F]*|\d+))*\.?")
_HOST_NAME: Final = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
MAX_URL_CHARS: Final = 4096


def is_public(address: str) -> bool:
    """Whether an address is one of the public internet and hides no other inside."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None or ip.scope_id is not None:
            return False
        if any(ip in net for net in _TRANSLATED):
            return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


def check_url(url: str, field: str) -> SplitResult:
    """Refuse a URL that is not plainly http(s) to a named host or a canonical address."""
    if len(url) > MAX_URL_CHARS or any(ord(char) <= 32 or ord(char) == 127 for char in url):
        raise BadRequestError("the URL is malformed", field=field)
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise BadRequestError("the URL is malformed", field=field) from None
    if parts.scheme not in ("http", "https"):
        raise BadRequestError("the URL must be http, https or data", field=field)
    if parts.username is not None or parts.password is not None or "\\" in url:
        raise BadRequestError("the URL must not carry credentials", field=field)
    if not host:
        raise BadRequestError("the URL names no host", field=field)
    if literal := literal_address(host):
        if not is_public(literal):
            raise not_public(field)
    elif _NUMERIC_HOST.fullmatch(host) or not _HOST_NAME.fullmatch(host):
        # 2130706433, 0x7f.1 and 0177.0.0.1 are loopback to the C library.
        raise not_public(field)
    return parts


def literal_address(host: str) -> str | None:
    """`host` when it is an address in canonical form, as in a URL without brackets."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return None


def not_public(field: str) -> BadRequestError:
    """One message whatever the address was: it must not tell what this network looks like."""
    return BadRequestError("the URL does not lead to a public address", field=field)
