"""uvicorn with vLLM's settings, and signals: the first drains, the second ends at once."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
from argparse import Namespace
from types import TracebackType
from typing import Any, Final

import uvicorn
from fastapi import FastAPI
from vllm import envs
from vllm.entrypoints.launchers.launcher import NoSignalServer
from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config
from vllm.entrypoints.launchers.utils.ssl import SSLCertRefresher

logger = logging.getLogger(__name__)
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """SIGINT and SIGTERM as events of the running loop, from the start of the server on."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        """Stop taking requests, finish those that run."""
        self.second = asyncio.Event()
        """Stop now."""

    def __enter__(self) -> StopSignals:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.raise_once)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    def raise_once(self) -> None:
        """One signal more."""
        (self.second if self.first.is_set() else self.first).set()


async def serve_app(
    app: FastAPI, sock: socket.socket, args: Namespace, drain_timeout_s: float, stop: StopSignals
) -> None:
    """Serve until a signal. Running requests get `drain_timeout_s`; a second signal cuts that."""
    config = uvicorn.Config(
        app, timeout_graceful_shutdown=math.ceil(drain_timeout_s), **_uvicorn_options(args)
    )
    config.h11_max_incomplete_event_size = args.h11_max_incomplete_event_size
    # Read by vLLM's version of the protocol class only.
    vars(config)["h11_max_header_count"] = args.h11_max_header_count
    config.load()
    server = NoSignalServer(config)
    app.state.server = server
    refresher = _certificate_refresher(args, config)
    watching = asyncio.create_task(_stop_server(server, stop))
    try:
        await server.serve(sockets=[sock])
    finally:
        watching.cancel()
        if refresher is not None:
            refresher.stop()


async def _stop_server(server: uvicorn.Server, stop: StopSignals) -> None:
    await stop.first.wait()
    logger.info("stopping: running requests may finish, a second signal ends them")
    server.should_exit = True
    await stop.second.wait()
    server.force_exit = True


def _uvicorn_options(args: Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {
        "host": args.host,
        "port": args.port,
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
