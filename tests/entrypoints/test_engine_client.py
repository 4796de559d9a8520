"""AsyncOmni as vLLM's EngineClient, and its start."""

from __future__ import annotations

import asyncio

import pytest
from vllm.engine.protocol import EngineClient

from tests.entrypoints.voice_rig import DELTA, collect, text_of, voice
from tests.fakes import (
    FakeLauncher,
    FakePreparer,
    FakeStageClient,
    chain_pipeline,
    fake_config,
    fake_omni,
    says,
    voice_pipeline,
)
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.errors import (
    ConfigError,
    RequestFailedError,
    StageStartError,
)


async def test_options_of_vllms_engine_reach_preparer_and_stage() -> None:
    async with voice() as stages:
        lora = object()
        await collect(
            stages.omni.generate("hi", DELTA, "x", lora_request=lora, priority=3, session_id="s")
        )
        expected = {"lora_request": lora, "priority": 3, "session_id": "s"}
        assert stages.preparers["thinker"].options == [expected]
        assert stages.thinker.added[0].options == expected


async def test_engine_methods_reach_the_text_stages() -> None:
    async with voice() as stages:
        stages.asr.utility = stages.thinker.utility = lambda *_: True
        assert await stages.omni.reset_prefix_cache()
        assert stages.asr.utility_calls == [("reset_prefix_cache", (False, False))]
        assert stages.thinker.utility_calls == [("reset_prefix_cache", (False, False))]
        assert stages.voice.utility_calls == []
        lora = object()
        assert await stages.omni.add_lora(lora)
        assert stages.thinker.utility_calls[-1] == ("add_lora", (lora,))
        assert len(stages.asr.utility_calls) == 1
        stages.thinker.utility = lambda *_: 1 / 0
        with pytest.raises(RequestFailedError, match="ZeroDivisionError"):
            await stages.omni.reset_mm_cache()


async def test_what_the_engine_cannot_do_says_so() -> None:
    async with voice() as stages:
        omni = stages.omni
        for work in (
            omni.sleep(),
            omni.wake_up(),
            omni.pause_generation(),
            omni.resume_generation(),
        ):
            with pytest.raises(NotImplementedError, match="this server does not"):
                await work
        with pytest.raises(NotImplementedError, match="embeddings"):
            omni.encode("hi", None, "x")
        assert not await omni.is_sleeping()
        assert not await omni.is_paused()
        assert await omni.get_supported_tasks() == ("generate",)


async def test_it_is_vllms_engine_client_of_the_chat_stage() -> None:
    config, renderer = type("Config", (), {"model_config": "model"})(), object()
    preparers = {"thinker": FakePreparer(config, renderer)}
    clients = [[FakeStageClient()] for _ in range(3)]
    async with fake_omni(voice_pipeline(), clients, preparers=preparers) as omni:
        assert isinstance(omni, EngineClient)
        assert (omni.vllm_config, omni.model_config, omni.renderer) == (config, "model", renderer)
        assert omni.preparer("thinker") is preparers["thinker"]
        assert repr(omni).startswith("<AsyncOmni fake_voice <OmniEngine live [<StagePool asr")


async def test_create_starts_without_blocking_the_loop() -> None:
    clients = [[FakeStageClient(says("hi"))]]
    omni = await AsyncOmni.create(
        config=fake_config(chain_pipeline(1)), launcher=FakeLauncher(clients)
    )
    async with omni:
        assert text_of(await collect(omni.generate("hi", DELTA))) == "hi"


async def test_create_that_fails_stops_what_had_started() -> None:
    clients = [[FakeStageClient()], [FakeStageClient()]]
    preparers = {"s0": FakePreparer(), "s1": FakePreparer()}
    launcher = FakeLauncher(clients, preparers, {"s1/0": StageStartError("no weights")})
    with pytest.raises(StageStartError, match="no weights"):
        await AsyncOmni.create(config=fake_config(chain_pipeline(2)), launcher=launcher)
    assert clients[0][0].shutdown_calls == 1
    assert [preparer.shutdown_calls for preparer in preparers.values()] == [1, 1]


async def test_create_that_is_cancelled_stops_what_had_started() -> None:
    began, stopped = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    async def never_ready(spec: object) -> None:
        loop.call_soon_threadsafe(began.set)
        try:
            await asyncio.Event().wait()
        finally:
            loop.call_soon_threadsafe(stopped.set)

    launcher = FakeLauncher([[FakeStageClient()]], on_start=never_ready)
    creating = asyncio.create_task(
        AsyncOmni.create(config=fake_config(chain_pipeline(1)), launcher=launcher)
    )
    async with asyncio.timeout(10):
        await began.wait()
        creating.cancel()
        await asyncio.wait([creating])
        assert creating.cancelled()
        await stopped.wait()


def test_it_takes_a_model_or_a_config() -> None:
    with pytest.raises(ConfigError, match="either a model or a resolved config"):
        AsyncOmni()
