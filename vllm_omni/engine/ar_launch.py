"""Start of an autoregressive replica: config, process, vLLM's handshake, a real first request."""

from __future__ import annotations

import asyncio
import dataclasses
import getpass
import logging
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import zmq
import zmq.asyncio
from vllm.config import VllmConfig
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.network_utils import make_zmq_listener
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.utils import (
    EngineHandshakeMetadata,
    EngineZmqAddresses,
    EngineZmqListeners,
)
from vllm.v1.executor.abstract import Executor

from vllm_omni.core.stage_core import run_stage_core
from vllm_omni.distributed.run_directory import RunDirectory
from vllm_omni.engine.ar_client import ArClient
from vllm_omni.engine.ar_config import build_vllm_config
from vllm_omni.engine.ar_prompts import PromptProcessor
from vllm_omni.engine.core_client import CoreClient
from vllm_omni.engine.messages import StageRequest
from vllm_omni.engine.process_shell import ReplicaProcess
from vllm_omni.engine.replica_spec import ReplicaSpec
from vllm_omni.envs import SEGMENT_PREFIX
from vllm_omni.errors import StageStartError
from vllm_omni.inputs.prompt import AudioInput, OmniPrompt
from vllm_omni.platforms import platform_of
from vllm_omni.vllm_compat.stat_logger import ReplicaStatLogger

logger = logging.getLogger(__name__)

_SELF_TEST_TOKENS: Final = 32
SELF_TEST_ID: Final = "self-test"
STOP_TIMEOUT_S: Final = 5.0


async def start_ar_replica(spec: ReplicaSpec) -> ArClient:
    """Start a replica and return its client once a request went through it.

    Raises:
        ConfigError: vLLM refuses the configuration or the checkpoint.
        StageStartError: the process did not become ready; its own error on one line.
    """
    began = time.monotonic()
    vllm_config, env = await asyncio.to_thread(build_vllm_config, spec)
    env = platform_of(spec.devices[0]).child_env(spec.devices) | env | dict(spec.env)
    spec = dataclasses.replace(spec, env=env)
    async with AsyncExitStack() as stack:
        folder = RunDirectory.create(spec.incarnation_name)
        stack.callback(folder.remove)
        spec = dataclasses.replace(spec, env=_own_places(spec, folder) | env)
        listeners = _listeners(folder)
        with _Handshake(folder, listeners.addresses) as handshake:
            process = _spawn(spec, vllm_config, handshake.address, folder)
            stack.push_async_callback(process.stop, 0.0)
            prompts = await _all_ready(spec, process, handshake, vllm_config)
        stack.callback(prompts.shutdown)
        core = CoreClient(vllm_config, Executor.get_class(vllm_config), listeners)
        stack.callback(core.close)
        client = ArClient(spec, process, core, prompts)
        await _self_test(client, spec, prompts)
        if not spec.engine_args.get("disable_log_stats"):
            client.record = ReplicaStatLogger(vllm_config, spec.name).record_step
        client.resources = stack.pop_all()
    logger.info("stage %s ready in %.1f s", spec.name, time.monotonic() - began)
    return client


def _own_places(spec: ReplicaSpec, folder: RunDirectory) -> dict[str, str]:
    """Where a replica leaves what a SIGKILL would leave there for ever: it goes with its folder.

    What is worth keeping for the next incarnation stays where it was.
    """
    common = Path(tempfile.gettempdir())
    env = {
        "TMPDIR": str(folder.path),
        "VLLM_RPC_BASE_PATH": str(common),  # a socket's path must be short
        "TORCHINDUCTOR_CACHE_DIR": str(common / f"torchinductor_{getpass.getuser()}"),
    }
    if len(spec.devices) > 1:
        env[SEGMENT_PREFIX] = folder.segment_prefix
    return env | {name: os.environ[name] for name in env if name in os.environ and name != "TMPDIR"}


async def _all_ready(
    spec: ReplicaSpec, process: ReplicaProcess, handshake: _Handshake, vllm_config: VllmConfig
) -> PromptProcessor:
    """Wait for the process; this side loads its tokenizer meanwhile."""
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(process.wait_ready(), name=f"{spec.name} start")
            group.create_task(handshake.run(), name=f"{spec.name} handshake")
            loading = group.create_task(
                asyncio.to_thread(PromptProcessor, spec.stage, vllm_config),
                name=f"{spec.name} tokenizer",
            )
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return loading.result()


def _listeners(folder: RunDirectory) -> EngineZmqListeners:
    """Bound before the core starts, in a folder that only this user can enter."""
    return EngineZmqListeners(
        inputs=[make_zmq_listener(folder.ipc("input"), zmq.ROUTER)],
        outputs=[make_zmq_listener(folder.ipc("output"), zmq.PULL)],
    )


def _spawn(
    spec: ReplicaSpec, vllm_config: VllmConfig, handshake_address: str, folder: RunDirectory
) -> ReplicaProcess:
    kwargs: Mapping[str, object] = {
        "name": spec.name,
        "vllm_config": vllm_config,
        "executor_class": Executor.get_class(vllm_config),
        "handshake_address": handshake_address,
        "data_bind": folder.ipc("data") if spec.has_targets or spec.has_sources else None,
        "is_conditioned": spec.is_conditioned,
    }
    return ReplicaProcess.spawn(run_stage_core, spec, kwargs)


class _Handshake:
    """The parent's side of vLLM's start-up handshake with one engine core."""

    def __init__(self, folder: RunDirectory, addresses: EngineZmqAddresses) -> None:
        self.address = folder.ipc("handshake")
        self._addresses = addresses

    def __enter__(self) -> _Handshake:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(self.address)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._socket.close(linger=0)
        self._context.term()

    async def run(self) -> None:
        """Answer HELLO with the addresses, wait for READY. Ends only so; cancel it otherwise."""
        identity = await self._receive("HELLO")
        metadata = EngineHandshakeMetadata(addresses=self._addresses, parallel_config={})
        await self._socket.send_multipart([identity, msgspec.msgpack.encode(metadata)])
        await self._receive("READY")

    async def _receive(self, status: str) -> bytes:
        identity, raw = await self._socket.recv_multipart()
        message: dict[str, Any] = msgspec.msgpack.decode(raw)
        if message.get("status") != status:
            raise StageStartError(f"engine core said {message.get('status')!r}, not {status!r}")
        return bytes(identity)


async def _self_test(client: ArClient, spec: ReplicaSpec, prompts: PromptProcessor) -> None:
    """One real request, one token: a replica that cannot do this is not ready."""
    params = SamplingParams(max_tokens=1, output_kind=RequestOutputKind.FINAL_ONLY)
    if spec.is_conditioned:  # a second token is fed with what the first one was made into
        params = SamplingParams(
            max_tokens=2, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
        )
    prompt = self_test_prompt(prompts)
    try:
        async with asyncio.timeout(spec.start_timeout_s):
            await client.add_request_async(
                StageRequest(SELF_TEST_ID, spec.stage_id, prompt, params)
            )
            (output,) = await client.get_outputs_async()
    except TimeoutError:
        raise StageStartError(f"stage {spec.name} did not answer its first request") from None
    except EngineDeadError as error:
        raise StageStartError(f"stage {spec.name} did not start: {error}") from error
    if output.failure is not None:
        raise StageStartError(f"stage {spec.name} failed: {output.failure.message}")


def self_test_prompt(prompts: PromptProcessor) -> OmniPrompt:
    """A short prompt that this stage's model can read.

    Longer than one token: reading and writing run different kernels, and both are to be loaded.
    """
    if prompts.reads_speech:
        silence = np.zeros(8000, np.float32)
        return OmniPrompt(audio=(AudioInput(silence, 16_000),))
    num_tokens = max(1, min(_SELF_TEST_TOKENS, prompts.model_config.max_model_len - 2))
    return OmniPrompt(token_ids=[prompts.renderer.get_bos_token_id() or 0] * num_tokens)
