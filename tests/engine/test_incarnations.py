"""Upstream is told one replica's address: no other replica may stand in, nor its successor."""

from __future__ import annotations

import asyncio

import pytest

from tests.engine.rig import AUDIO, Rig, running
from tests.fakes import FakeStageClient, chain_pipeline, settle


@pytest.mark.parametrize("successor", ["none", "another replica", "the next incarnation"])
async def test_a_target_that_dies_while_upstream_is_told_of_it_fails_the_request(
    successor: str,
) -> None:
    thinker = FakeStageClient()
    voices = [FakeStageClient(data_address=f"fake://{i}") for i in range(2)]
    slots = [voices[0], voices[1] if successor == "another replica" else None]
    rig = Rig([[thinker], slots], chain_pipeline(2, streams=True))
    thinker.add_gate = asyncio.Event()
    async with running(rig):
        await rig.add("a", plan=rig.plan(AUDIO))
        voices[0].crash()
        await settle()
        if successor == "the next incarnation":
            rig.orchestrator.attach_replica(1, 0, voices[1])
        thinker.add_gate.set()
        (error,) = await rig.errors()
        expected = {
            "none": "Stage-1 has no live replica",
            "another replica": "Stage-1 replica 0 died",
            "the next incarnation": "Stage-1 replica 0 died",
        }
        assert (error.request_id, error.stage_id) == ("a", 1)
        assert error.error == expected[successor]
        assert thinker.added[0].targets[0].address == "fake://0"
        assert voices[1].added == []
        assert thinker.abort_calls[-1] == ["a"]
        assert rig.known == set()


async def test_the_address_of_a_live_replica_is_told_and_kept() -> None:
    thinker, voice = FakeStageClient(), FakeStageClient(data_address="fake://0")
    rig = Rig([[thinker], [voice]], chain_pipeline(2, streams=True))
    async with running(rig):
        await rig.add("a", plan=rig.plan(AUDIO))
        assert thinker.added[0].targets[0].address == "fake://0"
        assert thinker.added[0].targets[0].stream == voice.added[0].sources[0].stream
