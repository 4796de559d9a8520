"""Submission: how requests, companions, updates and finished outputs reach the stages.

The middle of the orchestrator, on its loop. What happens when a stage cannot take a request is
`fault_isolation.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from vllm_omni.engine import decisions
from vllm_omni.engine.bridge import PromptBridge
from vllm_omni.engine.fault_isolation import FaultIsolation
from vllm_omni.engine.mailbox import Outbox
from vllm_omni.engine.messages import StageOutput, StageRequest, StreamTarget
from vllm_omni.engine.metrics_protocol import EngineMetrics
from vllm_omni.engine.queue_messages import AddCompanion, AddRequest, UpdateRequest
from vllm_omni.engine.request_state import OrchestratorRequestState
from vllm_omni.engine.stage_pool import StagePool
from vllm_omni.errors import (
    BadRequestError,
    OmniError,
    ReplicaDiedError,
    RequestFailedError,
    StageUnavailableError,
)
from vllm_omni.inputs.prompt import OmniPrompt

logger = logging.getLogger(__name__)


class Submission(FaultIsolation):
    """Everything that gives work to a stage."""

    def __init__(
        self,
        stage_pools: Sequence[StagePool],
        outbox: Outbox,
        *,
        bridges: Mapping[str, PromptBridge],
        metrics: EngineMetrics,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(stage_pools, outbox, metrics=metrics, clock=clock)
        self._bridges = bridges

    async def _handle_add_request(self, message: AddRequest) -> None:
        """Register a request, place it on a replica of every stage, submit and prewarm."""
        req_id, entry = message.request_id, message.plan.entry
        if not (self.stage_pools[entry].live_num_replicas or message.may_wait):
            await self._fail_request_dead_stage(req_id, entry)
            return
        state = OrchestratorRequestState.from_message(message)
        if message.session_id is not None and not await self._open_session(state):
            return
        self.request_states[req_id] = state
        self._deadlines.add(req_id, message.deadline_s)
        await self._place(state, message)

    async def _place(self, state: OrchestratorRequestState, message: AddRequest) -> None:
        """Give a registered request to replicas, or park it until there are some."""
        req_id, entry = message.request_id, message.plan.entry
        if message.may_wait and self._is_worth_waiting(message):
            state.parked = message
            return
        state.parked = None
        for stage_id in message.plan.stages:
            try:
                self.stage_pools[stage_id].preselect_replica_id(req_id)
            except StageUnavailableError:
                await self._fail_request_dead_stage(req_id, stage_id)
                return
        if await self._submit(state, entry, message.prompt, operation="add_request"):
            await self._prewarm(state)

    def _is_worth_waiting(self, message: AddRequest) -> bool:
        """Some stage has no replica, and each that has none is expected to get one in time."""
        without = [
            stage_id
            for stage_id in message.plan.stages
            if not self.stage_pools[stage_id].available_replica_ids()
        ]
        return bool(without) and all(
            self._supervision.expects(stage_id, message.deadline_s) for stage_id in without
        )

    async def _place_parked(self) -> None:
        """A replica came, or none will: look again at who waits for one."""
        for state in list(self.request_states.values()):
            if state.parked is not None and state.request_id in self.request_states:
                await self._place(state, state.parked)

    async def _open_session(self, state: OrchestratorRequestState) -> bool:
        assert state.session_id is not None
        try:
            self._sessions.open(state.session_id, state.request_id)
        except BadRequestError as error:
            await self._fail_dispatch(error, state.request_id, state.plan.entry, state.request_id)
            return False
        return True

    async def _submit(
        self, state: OrchestratorRequestState, stage_id: int, prompt: object, *, operation: str
    ) -> bool:
        """Give a request to a stage for the first time; False when it was failed."""
        pool = self.stage_pools[stage_id]
        # Stamped first: a replica that dies while it is being given the request still has it.
        state.stage_submit_ts[stage_id] = self._clock()
        self._metrics.request_submitted(pool.name)
        dispatched = await self._dispatch_or_fail_request(
            lambda: pool.submit_initial(self._stage_request(state, stage_id, prompt)),
            req_id=state.request_id,
            stage_id=stage_id,
            operation=operation,
        )
        if dispatched and state.session_id is not None:
            self._record_duplex_stage_submission(
                state.request_id, stage_id, pool.get_bound_replica_id(state.request_id) or 0
            )
        return dispatched

    def _stage_request(
        self, state: OrchestratorRequestState, stage_id: int, prompt: object
    ) -> StageRequest:
        """One request as one stage sees it, with the streams it reads and writes."""
        stage = state.plan.stages[stage_id]
        return StageRequest(
            state.request_id,
            stage_id,
            prompt,
            state.params[stage_id],
            state.stream_sources(stage_id) if stage.stream_sources else (),
            tuple(
                StreamTarget(
                    self._told_address(edge.target, state),
                    state.request_id + edge.label,
                    edge.conditions,
                )
                for edge in stage.stream_targets
            ),
            state.deadline_s,
            state.options,
        )

    def _told_address(self, stage_id: int, state: OrchestratorRequestState) -> str:
        address = self._data_address(stage_id, state.request_id)
        state.target_addresses[stage_id] = address
        return address

    def _data_address(self, stage_id: int, request_id: str) -> str:
        """Where the replica of a streaming target takes this request's chunks."""
        pool = self.stage_pools[stage_id]
        address = pool.client(pool.preselect_replica_id(request_id)).data_address
        if address is None:
            raise RequestFailedError(f"stage {pool.name!r} takes no streams")
        return address

    async def _prewarm(self, state: OrchestratorRequestState) -> bool:
        """Submit every stage that streams feed, so that it is there for the first chunk."""
        for stage_id in state.plan.prewarmed:
            if not await self._has_told_replica(state, stage_id):
                return False
            if not await self._submit(state, stage_id, None, operation="async-chunk prewarm"):
                return False
        return True

    async def _has_told_replica(self, state: OrchestratorRequestState, stage_id: int) -> bool:
        """Whether the replica that upstream pushes to is still the one; else it is failed.

        It may have died meanwhile: neither another replica nor its successor gets those chunks.
        """
        told = state.target_addresses.get(stage_id)
        pool = self.stage_pools[stage_id]
        bound = pool.get_bound_replica_id(state.request_id)
        client = pool.clients[bound] if bound is not None else None
        if (
            told is None
            or state.request_id not in self.request_states
            or (client is not None and client.data_address == told)
        ):
            return True
        if not pool.live_num_replicas:
            await self._fail_request_dead_stage(state.request_id, stage_id)
            return False
        error = ReplicaDiedError(f"Stage-{stage_id} replica {bound} died")
        await self._fail_dispatch(error, state.request_id, stage_id, state.request_id)
        return False

    async def _tell_source_ended(self, state: OrchestratorRequestState, stage_id: int) -> None:
        """A stage has finished writing: those that read its streams need not wait long now."""
        for edge in state.plan.stages[stage_id].stream_targets:
            pool = self.stage_pools[edge.target]
            bound = pool.get_bound_replica_id(state.request_id)
            client = pool.clients[bound] if bound is not None else None
            if client is not None and edge.target not in state.finished_ts:
                await client.source_ended_async(state.request_id, state.request_id + edge.label)

    def _record_duplex_stage_submission(self, req_id: str, stage_id: int, replica_id: int) -> None:
        """Note on which replica a session's stage runs."""
        self._sessions.record(req_id, stage_id, replica_id)

    async def _handle_streaming_update(self, message: UpdateRequest) -> None:
        """Give more input to a running session's entry stage."""
        state = self.request_states.get(message.request_id)
        if state is None:
            return  # it ended meanwhile, and its client was told
        dispatched = await self._update(
            state, state.plan.entry, message.prompt, message.params, "streaming_update"
        )
        if dispatched:
            for prewarmed in state.plan.prewarmed:
                if prewarmed not in state.stage_submit_ts and not await self._submit(
                    state, prewarmed, None, operation="async-chunk prewarm"
                ):
                    return

    async def _update(
        self,
        state: OrchestratorRequestState,
        stage_id: int,
        prompt: object,
        params: object,
        operation: str,
    ) -> bool:
        """Give more input to a stage that has the request; False when it was failed."""
        decisions.on_update(state, stage_id, self._clock())
        pool = self.stage_pools[stage_id]
        request = self._stage_request(state, stage_id, prompt)
        request.params = params
        return await self._dispatch_or_fail_request(
            lambda: pool.submit_update(request),
            req_id=state.request_id,
            stage_id=stage_id,
            operation=operation,
        )

    async def _handle_add_companion(self, message: AddCompanion) -> None:
        """Submit a companion to its parent's entry stage, on the parent's replica."""
        parent = self.request_states.get(message.parent_id)
        if parent is None:
            return  # the parent ended meanwhile, and its client was told
        entry = parent.plan.entry
        companion = OrchestratorRequestState(
            message.request_id,
            parent.plan,
            parent.omni_prompt,
            parent.params,
            parent.arrival_s,
            parent.deadline_s,
            parent.delta,
            parent.options,
            {},
            0,
            {entry: self._clock()},
            parent_id=message.parent_id,
        )
        self.request_states[message.request_id] = companion
        self._cfg_tracker.register(message.parent_id, message.request_id)
        parent.open_companions += 1
        pool = self.stage_pools[entry]
        request = StageRequest(
            message.request_id, entry, message.prompt, message.params, deadline_s=parent.deadline_s
        )
        if await self._dispatch_or_fail_request(
            lambda: pool.submit_initial(request, affinity_request_id=message.parent_id),
            req_id=message.parent_id,
            stage_id=entry,
            operation=f"companion {message.request_id}",
            dispatch_req_id=message.request_id,
        ):
            logger.debug(
                "request=%s companion of %s on replica %s",
                message.request_id,
                message.parent_id,
                pool.get_bound_replica_id(message.request_id),
            )

    async def _forward_to_next_stage(
        self,
        req_id: str,
        src_stage_id: int,
        output: StageOutput,
        req_state: OrchestratorRequestState,
        *,
        src_replica_id: int | None = None,
        is_streaming_session: bool = False,
        is_final_update: bool = False,
    ) -> None:
        """Make the next stages' prompts from finished outputs; fails only this request."""
        targets = req_state.plan.stages[src_stage_id].prompt_targets
        await self._dispatch_or_fail_request(
            lambda: self._forward_to_next_stage_unguarded(
                req_id,
                src_stage_id,
                output,
                req_state,
                src_replica_id=src_replica_id,
                is_streaming_session=is_streaming_session,
                is_final_update=is_final_update,
            ),
            req_id=req_id,
            stage_id=targets[0] if targets else src_stage_id + 1,
            operation="inter-stage forward",
        )

    async def _forward_to_next_stage_unguarded(
        self,
        req_id: str,
        src_stage_id: int,
        output: StageOutput,
        req_state: OrchestratorRequestState,
        *,
        src_replica_id: int | None = None,
        is_streaming_session: bool = False,
        is_final_update: bool = False,
    ) -> None:
        for target in req_state.plan.stages[src_stage_id].prompt_targets:
            is_update = is_streaming_session and target in req_state.stage_submit_ts
            if not req_state.is_ready_for(target):
                continue
            if not self.stage_pools[target].live_num_replicas:
                await self._fail_request_dead_stage(req_id, target)
                return
            prompt = self._bridge_prompt(req_state, target)
            if is_streaming_session:
                req_state.kept.pop(src_stage_id, None)  # the next turn starts anew
            if is_update:
                if not await self._update(
                    req_state, target, prompt, req_state.params[target], "inter-stage forward"
                ):
                    return
            elif not await self._submit(req_state, target, prompt, operation="inter-stage forward"):
                return

    def _bridge_prompt(self, state: OrchestratorRequestState, target: int) -> OmniPrompt:
        """Run the family's bridge. Whatever it raises fails this request and no other."""
        stage = state.plan.stages[target]
        upstream = {
            state.plan.stages[source].name: self._upstream_outputs(state, source)
            for source in stage.prompt_sources
        }
        try:
            return self._bridges[stage.bridge](state.omni_prompt, upstream)
        except OmniError:
            raise
        except Exception as error:
            logger.exception("request=%s bridge %s failed", state.request_id, stage.bridge)
            raise RequestFailedError(
                f"the bridge into stage {stage.name!r} failed: {type(error).__name__}: {error}"
            ) from error

    def _upstream_outputs(
        self, state: OrchestratorRequestState, source: int
    ) -> Sequence[StageOutput]:
        """What a source stage made for a request and then for each of its companions."""
        outputs = list(state.kept.get(source, ()))
        for companion_id in self._cfg_tracker.companions_of(state.request_id):
            companion = self.request_states[companion_id]
            outputs.extend(companion.kept.get(source, ()))
        return outputs
