"""`serve`: bind the port, start the stages, serve, and leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from argparse import Namespace
from typing import TYPE_CHECKING, Final

from vllm.entrypoints.launchers.launcher import setup_server

from vllm_omni.config.deploy import ResolvedConfig
from vllm_omni.config.pipeline import Task
from vllm_omni.entrypoints.openai.app import build_omni_app
from vllm_omni.entrypoints.openai.http_server import check_certificates, serve_app
from vllm_omni.entrypoints.openai.media.pool import MediaPool
from vllm_omni.entrypoints.openai.stop_signals import StopSignals
from vllm_omni.entrypoints.openai.videos.files import data_folder
from vllm_omni.entrypoints.openai.videos.jobs import VideoJobs
from vllm_omni.entrypoints.openai.videos.store import VideoStore
from vllm_omni.errors import ConfigError
from vllm_omni.metrics.engine_metrics import PrometheusEngineMetrics, show

if TYPE_CHECKING:
    from vllm_omni.entrypoints.async_omni import AsyncOmni

logger = logging.getLogger(__name__)

_START_END_S: Final = 5.0
"""Seconds that a start which is broken off may take to end."""


async def serve(
    args: Namespace,
    config: ResolvedConfig,
    admin_key: str | None = None,
    data_dir: str | None = None,
) -> None:
    """Run the server until a signal ends it. With an `admin_key` operators have their routes.

    `data_dir` is where videos are kept; None: a folder for this server's port.

    Raises:
        OmniError: it cannot start; the command line prints its one line.
    """
    check_certificates(args)
    address, sock = _bind(args)
    with contextlib.ExitStack() as resources, sock, StopSignals() as stop:
        store = _video_store(args, config, data_dir)
        if store is not None:
            resources.callback(store.close)
        omni = await _started(config, stop)
        if omni is None:
            return
        try:
            async with contextlib.AsyncExitStack() as stack:
                pool = stack.enter_context(contextlib.closing(MediaPool()))
                jobs = None
                if store is not None:
                    running = VideoJobs.running(store, pool, config.limits)
                    jobs = await stack.enter_async_context(running)
                app = await build_omni_app(args, omni, pool, admin_key, jobs)
                # Its connections may linger when it has stopped; the next server must not wait.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                logger.info("serving on %s", address)
                await serve_app(
                    app,
                    sock,
                    args,
                    drain_timeout_s=omni.config.limits.drain_timeout_s,
                    stop=stop,
                    end_requests=omni.aclose,
                )
        finally:
            await omni.aclose()


def _video_store(
    args: Namespace, config: ResolvedConfig, data_dir: str | None
) -> VideoStore | None:
    """Open before anything slow: a folder that cannot be used is the operator's error."""
    if Task.VIDEO not in config.pipeline.entries:
        if data_dir is not None:
            raise ConfigError("--data-dir is for models that make videos; this one makes none")
        return None
    return VideoStore(data_folder(args, data_dir), config.limits)


def _bind(args: Namespace) -> tuple[str, socket.socket]:
    """Take the port before anything slow; a port in use is the operator's error."""
    try:
        address, sock = setup_server(args, reuse_port=False)
        # Until a socket listens, any other that may share its address could bind it too.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        return address, sock
    except (OSError, OverflowError, UnicodeError) as exc:
        # A port beyond all ports, a host name with letters of no host name, a long path.
        where = args.uds or f"{args.host or '0.0.0.0'}:{args.port}"
        why = getattr(exc, "strerror", None) or exc
        raise ConfigError(f"cannot listen on {where}: {why}") from None
    except KeyError as exc:
        raise ConfigError(str(exc.args[0])) from None


async def _started(config: ResolvedConfig, stop: StopSignals) -> AsyncOmni | None:
    """Start the stages; None when a signal came first, and then nothing is left running."""
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    metrics = PrometheusEngineMetrics(stage.config.name for stage in config.stages)
    show(metrics)
    starting = asyncio.ensure_future(AsyncOmni.create(config=config, metrics=metrics))
    stopping = asyncio.ensure_future(stop.first.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            omni = await starting
            metrics.watch(omni.engine.replica_figures)
            return omni
        logger.info("stopped while the stages were starting")
        stop.leave_within(_START_END_S)
        return None
    finally:
        for task in (starting, stopping):
            task.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)
