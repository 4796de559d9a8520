"""uvicorn with vLLM's settings, and its end: drain, tell those that remain, close."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from argparse import Namespace
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import uvicorn
from fastapi import FastAPI
from uvicorn.config import create_ssl_context
from vllm import envs
from vllm.entrypoints.launchers.launcher import NoSignalServer
from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config
from vllm.entrypoints.launchers.utils.ssl import SSLCertRefresher

from vllm_omni.entrypoints.openai.draining import Drain, DrainMiddleware
from vllm_omni.entrypoints.openai.http_protocol import BoundedHttpProtocol
from vllm_omni.entrypoints.openai.stop_signals import StopSignals
from vllm_omni.errors import ConfigError

logger = logging.getLogger(__name__)
_FLUSH_S: Final = 2
"""Seconds for the last answers to leave once nothing runs any more."""
_END_S: Final = 5.0
"""Seconds for replicas and sockets to close after the drain; then the process is ended."""


def check_certificates(args: Namespace) -> None:
    """Read the files of TLS before anything slow.

    Raises:
        ConfigError: they cannot be used, or nothing would come of them.
    """
    files = {
        "--ssl-certfile": args.ssl_certfile,
        "--ssl-keyfile": args.ssl_keyfile,
        "--ssl-ca-certs": args.ssl_ca_certs,
    }
    if not args.ssl_certfile:
        for flag, value in (*files.items(), ("--enable-ssl-refresh", args.enable_ssl_refresh)):
            if value:
                raise ConfigError(f"{flag} needs --ssl-certfile")
        return
    for flag, path in files.items():
        if path and not Path(path).is_file():
            raise ConfigError(f"{flag}: no file {path!r}")
    try:
        create_ssl_context(
            args.ssl_certfile,
            args.ssl_keyfile,
            password=None,
            ssl_version=ssl.PROTOCOL_TLS_SERVER,
            cert_reqs=args.ssl_cert_reqs,
            ca_certs=args.ssl_ca_certs,
            ciphers=args.ssl_ciphers,
        )
    except (OSError, ValueError) as exc:
        given = ", ".join(f"{flag} {path}" for flag, path in files.items() if path)
        raise ConfigError(f"no TLS with {given}: {exc}") from None


async def serve_app(
    app: FastAPI,
    sock: socket.socket,
    args: Namespace,
    *,
    drain_timeout_s: float,
    stop: StopSignals,
    end_requests: Callable[[], Awaitable[None]],
) -> None:
    """Serve until a signal. Running requests get `drain_timeout_s`; a second signal cuts that.

    `end_requests` fails what runs then, so that every client is told why.
    """
    drain = Drain()
    app.add_middleware(DrainMiddleware, drain=drain)
    config = uvicorn.Config(app, timeout_graceful_shutdown=_FLUSH_S, **_uvicorn_options(args))
    config.h11_max_incomplete_event_size = args.h11_max_incomplete_event_size
    vars(config)["h11_max_header_count"] = args.h11_max_header_count
    config.load()
    server = NoSignalServer(config)
    app.state.server = server
    refresher = _certificate_refresher(args, config)
    watching = asyncio.create_task(
        _stop_server(server, drain, drain_timeout_s, stop, end_requests), name="stop"
    )
    try:
        await server.serve(sockets=[sock])
    finally:
        watching.cancel()
        if refresher is not None:
            refresher.stop()


async def _stop_server(
    server: uvicorn.Server,
    drain: Drain,
    drain_timeout_s: float,
    stop: StopSignals,
    end_requests: Callable[[], Awaitable[None]],
) -> None:
    await stop.first.wait()
    logger.info(
        "stopping: %d running requests may finish within %g s, a second signal ends them",
        drain.num_running,
        drain_timeout_s,
    )
    drain.begin()
    await _first_of(drain.idle, stop.second, timeout_s=drain_timeout_s)
    stop.leave_within(_END_S)
    if drain.num_running:
        logger.warning("%d requests did not finish and are ended", drain.num_running)
        ending = asyncio.ensure_future(end_requests())
        await _first_of(drain.idle, timeout_s=_FLUSH_S)
        server.should_exit = True
        await ending
    server.should_exit = True
    await stop.second.wait()
    server.force_exit = True


async def _first_of(*events: asyncio.Event, timeout_s: float) -> None:
    """Wait for any of the events."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


def _uvicorn_options(args: Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {
        "host": args.host,
        "port": args.port,
        "http": BoundedHttpProtocol,
        "log_level": args.uvicorn_log_level,
        "access_log": not args.disable_uvicorn_access_log,
        "timeout_keep_alive": envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        "ssl_keyfile": args.ssl_keyfile,
        "ssl_certfile": args.ssl_certfile,
        "ssl_ca_certs": args.ssl_ca_certs,
        "ssl_cert_reqs": args.ssl_cert_reqs,
        "ssl_ciphers": args.ssl_ciphers,
    }
    log_config = get_uvicorn_log_config(args)
    if log_config is not None:
        options["log_config"] = log_config
    return options


def _certificate_refresher(args: Namespace, config: uvicorn.Config) -> SSLCertRefresher | None:
    if not args.enable_ssl_refresh:
        return None
    return SSLCertRefresher(
        ssl_context=config.ssl,
        key_path=config.ssl_keyfile,
        cert_path=config.ssl_certfile,
        ca_path=config.ssl_ca_certs,
    )
