"""A route compiled for the orchestrator: who feeds whom, by stage id. Immutable and cached."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from vllm_omni.config.pipeline import Edge, Modality, PipelineConfig, Route, Task, plan_route


@dataclass(frozen=True, slots=True)
class StreamEdge:
    """One streaming edge of a route."""

    source: int
    target: int
    source_name: str
    bridge: str
    label: str
    """Suffix that makes a stream id out of a request id."""
    conditions: bool = False
    """See `StreamTarget.conditions`."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage of a route and its neighbours."""

    stage_id: int
    name: str
    emits: bool
    """Its outputs go to the client."""
    prompt_sources: tuple[int, ...]
    """Stages whose finished outputs a `PromptBridge` turns into this stage's prompt."""
    prompt_targets: tuple[int, ...]
    stream_sources: tuple[StreamEdge, ...]
    stream_targets: tuple[StreamEdge, ...]
    bridge: str = ""
    """`module:name` of the `PromptBridge`; empty without prompt sources."""


@dataclass(frozen=True, slots=True, eq=False)
class RoutePlan:
    """All stages of a route. Compared by identity: there is one plan for each kind of request."""

    entry: int
    stages: dict[int, StagePlan]
    """By stage id, in topological order."""
    emitting: frozenset[int]
    prewarmed: tuple[int, ...]
    """Stages that start with the request because streams feed them, in topological order."""


@functools.lru_cache(maxsize=1024)
def compile_plan(
    pipeline: PipelineConfig,
    task: Task,
    inputs: frozenset[Modality],
    outputs: frozenset[Modality],
) -> RoutePlan:
    """Plan the route of one kind of request.

    Raises:
        UnsupportedModalityError: see `plan_route`.
    """
    return plan_of(pipeline, plan_route(pipeline, task, inputs, outputs))


def plan_of(pipeline: PipelineConfig, route: Route) -> RoutePlan:
    """Compile a route that was already chosen."""
    streams = [_stream_edge(pipeline, edge) for edge in route.edges if edge.streams]
    prompts = [edge for edge in route.edges if not edge.streams]
    stages = {
        stage_id: _stage_plan(pipeline, route, stage_id, streams, prompts)
        for stage_id in route.stages
    }
    return RoutePlan(
        entry=route.entry,
        stages=stages,
        emitting=route.emitting,
        prewarmed=tuple(
            stage.stage_id
            for stage in stages.values()
            if stage.stream_sources and not stage.prompt_sources
        ),
    )


def _stream_edge(pipeline: PipelineConfig, edge: Edge) -> StreamEdge:
    return StreamEdge(
        source=pipeline.stage_id(edge.source),
        target=pipeline.stage_id(edge.target),
        source_name=edge.source,
        bridge=edge.bridge,
        label=f"/{edge.source}>{edge.target}",
        conditions=edge.capture is not None,
    )


def _stage_plan(
    pipeline: PipelineConfig,
    route: Route,
    stage_id: int,
    streams: list[StreamEdge],
    prompts: list[Edge],
) -> StagePlan:
    name = pipeline.stages[stage_id].name
    incoming = [edge for edge in prompts if edge.target == name]
    bridges = {edge.bridge for edge in incoming}
    if len(bridges) > 1:
        raise ValueError(
            f"pipeline {pipeline.model_type!r}: edges into stage {name!r} name several prompt "
            f"bridges: {', '.join(sorted(bridges))}; one joins all its sources"
        )
    return StagePlan(
        stage_id=stage_id,
        name=name,
        emits=stage_id in route.emitting,
        prompt_sources=tuple(pipeline.stage_id(edge.source) for edge in incoming),
        prompt_targets=tuple(
            pipeline.stage_id(edge.target) for edge in prompts if edge.source == name
        ),
        stream_sources=tuple(edge for edge in streams if edge.target == stage_id),
        stream_targets=tuple(edge for edge in streams if edge.source == stage_id),
        bridge=bridges.pop() if bridges else "",
    )
