"""Real replicas that die, hang and are restarted: the server goes on and they come back."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from tests.entrypoints.voice_rig import collect
from tests.fakes import eventually
from tests.generation.replicas import Listener, listen, pid_of, running, say
from tests.generation.tone import spoken
from tests.supervised import ToneLauncher, tone_server
from vllm_omni.config.pipeline import Task
from vllm_omni.distributed.omni_connectors.factory import open_connector
from vllm_omni.distributed.run_directory import RunDirectory
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


async def test_a_stopped_replica_is_found_by_its_silence_and_replaced() -> None:
    launcher = ToneLauncher()
    async with tone_server(launcher, stall_timeout_s=5.0, restart_backoff_s=0.1) as omni:
        stream = omni.generate("hello world", task=Task.SPEECH, speech=SpeechParams())
        os.kill(pid_of(launcher.started[0][1]), signal.SIGSTOP)
        with pytest.raises(ReplicaDiedError, match="voice/0 gave no sign of life for"):
            await anext(stream)
        await eventually(lambda: is_healthy(omni), timeout_s=20)
        assert await speak(omni, "back") == spoken("back")


async def test_a_forward_that_hangs_is_found_although_the_process_lives() -> None:
    launcher = ToneLauncher()
    async with tone_server(launcher, stall_timeout_s=5.0, restart_backoff_s=0.1) as omni:
        stream = omni.generate("!sleep=1000", task=Task.SPEECH, speech=SpeechParams())
        with pytest.raises(ReplicaDiedError, match="voice/0 made no progress for"):
            await anext(stream)
        await eventually(lambda: is_healthy(omni), timeout_s=20)
        assert await speak(omni, "back") == spoken("back")


async def test_a_request_that_waits_for_its_input_is_no_stall() -> None:
    async with running() as client:
        await client.add_request_async(listen("a", "s"))
        progress = []
        async with asyncio.timeout(10):
            while len(progress) < 3:
                beat = client.heartbeat()
                if beat is not None and (
                    not progress or beat.received_s != progress[-1].received_s
                ):
                    progress.append(beat)
                await asyncio.sleep(0.1)
        assert [beat.num_runnable for beat in progress[1:]] == [0, 0]


async def test_chunks_for_a_dead_incarnation_never_reach_its_successor() -> None:
    directory = RunDirectory.create("thinker/0")
    thinker = open_connector("thinker/0", directory.ipc("data"))
    try:
        async with running() as first:
            old = first.data_address
            assert old is not None
            thinker.sender.open(old, "s")
            os.kill(pid_of(first), signal.SIGKILL)
            async with running(incarnation=2) as second:
                assert second.data_address != old
                listener = Listener(second)
                await second.add_request_async(listen("a", "s"))
                thinker.sender.push("s", b"for the dead ")
                thinker.sender.end("s")
                await second.add_request_async(say("b", "for the living"))
                await listener.until_ended("b")
                assert listener.pcm == {"b": spoken("for the living")}
                assert "a" not in listener.ended
    finally:
        thinker.close()
        directory.remove()


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
