"""Real replicas that die, hang and are restarted: the server goes on and they come back."""

from __future__ import annotations

import os
import signal
import time

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from tests.entrypoints.voice_rig import collect
from tests.fakes import eventually
from tests.generation.replicas import pid_of
from tests.generation.tone import spoken
from tests.supervised import ToneLauncher, tone_server
from vllm_omni.config.pipeline import Task
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.omni_base import OmniBase
from vllm_omni.errors import ReplicaDiedError
from vllm_omni.inputs.speech import SpeechParams


async def speak(omni: AsyncOmni, text: str) -> bytes:
    outputs = await collect(omni.generate(text, task=Task.SPEECH, speech=SpeechParams()))
    return b"".join(output.audio.pcm for output in outputs if output.audio is not None)


def is_healthy(omni: AsyncOmni) -> bool:
    try:
        OmniBase.check_health(omni)
    except EngineDeadError:
        return False
    return True


async def test_a_killed_replica_comes_back_and_serves() -> None:
    launcher = ToneLauncher()
    async with tone_server(launcher, restart_backoff_s=0.1) as omni:
        assert await speak(omni, "one two") == spoken("one two")
        (_, first) = launcher.started[0]
        os.kill(pid_of(first), signal.SIGKILL)
        killed_s = time.monotonic()
        await eventually(lambda: not is_healthy(omni), timeout_s=0.5)
        await eventually(lambda: is_healthy(omni), timeout_s=20)
        assert time.monotonic() - killed_s < 10
        assert await speak(omni, "three") == spoken("three")
        (status,) = omni.engine.supervisor.statuses()
        assert (status.state, status.incarnation, status.restarts) == ("ready", 2, 1)
        assert "SIGKILL" in (status.last_error or "")
        assert launcher.started[1][1].data_address != first.data_address


async def test_a_request_on_the_killed_replica_fails_at_once_when_there_is_no_other() -> None:
    launcher = ToneLauncher()
    async with tone_server(launcher) as omni:
        stream = omni.generate("hello !sleep=5 never", task=Task.SPEECH, speech=SpeechParams())
        assert (await anext(stream)).audio is not None
        killed_s = time.monotonic()
        os.kill(pid_of(launcher.started[0][1]), signal.SIGKILL)
        with pytest.raises(ReplicaDiedError, match="SIGKILL"):
            await anext(stream)
        assert time.monotonic() - killed_s < 0.5
