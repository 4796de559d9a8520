"""Companions (guidance prompts) go where their parent goes and end with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.engine.rig import AUDIO, Rig, running
from tests.fakes import FakeStageClient, failure_output, settle, text_output
from vllm_omni.engine.cfg_companions import CfgCompanionTracker
from vllm_omni.engine.messages import StageOutput
from vllm_omni.engine.queue_messages import AddCompanion
from vllm_omni.inputs.prompt import OmniPrompt


class Guided(Rig):
    """Two stages; two replicas of the first one."""

    def __init__(self) -> None:
        self.first = [FakeStageClient(replica_id=i) for i in range(2)]
        self.second = FakeStageClient()
        self.seen: list[list[str]] = []
        super().__init__(
            [self.first, [self.second]], bridges={"tests.fakes:join_texts": self._bridge}
        )

    def _bridge(
        self, prompt: OmniPrompt, upstream: Mapping[str, Sequence[StageOutput]]
    ) -> OmniPrompt:
        self.seen.append([output.text.outputs[0].text for output in upstream["s0"]])
        return prompt

    async def add_guided(self, parent_id: str = "p", companion_id: str = "c") -> None:
        self.inbox.put(self.request(parent_id, self.plan(AUDIO)))
        self.inbox.put(
            AddCompanion(
                request_id=companion_id,
                parent_id=parent_id,
                prompt=OmniPrompt(text="blurry"),
                params=None,
            )
        )
        await settle()


async def test_a_companion_goes_to_its_parents_replica() -> None:
    rig = Guided()
    async with running(rig):
        await rig.add("other", plan=rig.plan(AUDIO))
        await rig.add_guided()
        assert rig.first[0].added_ids == ["other"]
        assert rig.first[1].added_ids == ["p", "c"]
        assert rig.pools[0].get_bound_replica_id("c") == 1


async def test_the_parent_waits_for_its_companion() -> None:
    rig = Guided()
    async with running(rig):
        await rig.add_guided()
        rig.first[0].emit(text_output("p", "a cat", finished=True))
        await settle()
        assert rig.second.added == []
        rig.first[0].emit(text_output("c", "blurry", finished=True))
        await settle()
        assert rig.second.added_ids == ["p"]
        assert rig.seen == [["a cat", "blurry"]]


async def test_a_companion_that_is_first_waits_for_its_parent() -> None:
    rig = Guided()
    async with running(rig):
        await rig.add_guided()
        rig.first[0].emit(text_output("c", "blurry", finished=True))
        await settle()
        assert rig.second.added == []
        rig.first[0].emit(text_output("p", "a cat", finished=True))
        await settle()
        assert rig.second.added_ids == ["p"]


async def test_a_companions_outputs_never_reach_the_client() -> None:
    rig = Guided()
    async with running(rig):
        rig.inbox.put(rig.request("p"))  # text goes to the client
        rig.inbox.put(AddCompanion(request_id="c", parent_id="p", prompt=None, params=None))
        await settle()
        rig.first[0].emit(text_output("c", "secret", finished=True))
        assert await rig.outputs() == []


async def test_both_are_released_when_the_parent_ends() -> None:
    rig = Guided()
    async with running(rig):
        await rig.add_guided()
        rig.first[0].emit(
            text_output("p", "a cat", finished=True), text_output("c", "x", finished=True)
        )
        await settle()
        rig.second.emit(text_output("p", "", finished=True))
        (last,) = await rig.outputs()
        assert last.request_id == "p"
        assert rig.known == set()
        assert [pool.get_bound_replica_id("c") for pool in rig.pools] == [None, None]
        assert len(rig.orchestrator._cfg_tracker) == 0


async def test_a_companion_into_a_dead_stage_fails_its_parent() -> None:
    rig = Guided()
    async with running(rig):
        await rig.add("p", plan=rig.plan(AUDIO))
        rig.pools[0].evict_replica(0)
        rig.pools[0].evict_replica(1)
        rig.inbox.put(AddCompanion(request_id="c", parent_id="p", prompt=None, params=None))
        (error,) = await rig.errors()
        assert (error.request_id, error.stage_id) == ("p", 0)
        assert error.error == "Stage-0 has no live replica"
        assert rig.known == set()


async def test_a_companion_alone_on_the_dead_replica_fails_its_parent() -> None:
    rig = Guided()
    async with running(rig):
        await rig.add_guided()
        rig.pools[0]._bindings["c"] = 1
        rig.first[1].crash("killed")
        (error,) = await rig.errors()
        assert (error.request_id, error.error) == ("p", "killed")
        assert rig.known == set()
        assert rig.first[0].abort_calls == [["p"]]


async def test_a_death_that_takes_both_is_told_once() -> None:
    rig = Guided()
    async with running(rig):
        await rig.add_guided()
        rig.first[0].crash("killed")
        assert [error.request_id for error in await rig.errors()] == ["p"]
        assert rig.known == set()


async def test_a_companion_that_fails_fails_its_parent() -> None:
    rig = Guided()
    async with running(rig):
        await rig.add_guided()
        rig.first[0].emit(failure_output("c", "out of blocks"))
        (error,) = await rig.errors()
        assert (error.request_id, error.error) == ("p", "out of blocks")
        assert rig.known == set()
        assert rig.first[0].abort_calls == [["p"]]


async def test_aborting_the_parent_aborts_its_companion() -> None:
    rig = Guided()
    async with running(rig):
        await rig.add_guided()
        rig.inbox.abort(["p"])
        await settle()
        assert rig.first[0].abort_calls == [["p", "c"]]
        assert rig.known == set()


async def test_a_companion_of_a_parent_that_is_gone_is_dropped() -> None:
    rig = Guided()
    async with running(rig):
        rig.inbox.put(AddCompanion(request_id="c", parent_id="gone", prompt=None, params=None))
        assert await rig.errors() == []
        assert rig.first[0].added == []
        assert rig.known == set()


def test_the_tracker_forgets_a_parent_with_its_companions() -> None:
    tracker = CfgCompanionTracker()
    tracker.register("p", "c1")
    tracker.register("p", "c2")
    assert tracker.companions_of("p") == ["c1", "c2"]
    assert tracker.cleanup_parent("p") == ["c1", "c2"]
    assert (tracker.companions_of("p"), tracker.cleanup_parent("p"), len(tracker)) == ([], [], 0)
