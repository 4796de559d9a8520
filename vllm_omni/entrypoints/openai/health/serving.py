"""Health as the engine sees it, stage by stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni.engine.replica_state import ReplicaStatus
from vllm_omni.entrypoints.omni_base import OmniBase
from vllm_omni.entrypoints.openai.replica_status import status_fields


@dataclass(frozen=True, slots=True)
class HealthReport:
    """What /health says."""

    stages: Mapping[str, str]
    """`ready` or `dead` by stage name."""
    replicas: Sequence[ReplicaStatus]
    error: str | None
    """The first thing that is wrong."""

    def body(self) -> dict[str, object]:
        by_stage: dict[str, list[dict[str, object]]] = {stage: [] for stage in self.stages}
        for one in self.replicas:
            by_stage[one.stage].append(status_fields(one))
        body: dict[str, object] = {
            "status": "healthy" if self.error is None else "unhealthy",
            "stages": dict(self.stages),
            "replicas": by_stage,
        }
        return body if self.error is None else {**body, "error": self.error}


def health_of(omni: OmniBase) -> HealthReport:
    """Look at every stage; costs no round trip."""
    dead = omni.dead_stages()
    stages = {
        stage.name: "dead" if stage.name in dead else "ready" for stage in omni.pipeline.stages
    }
    replicas = omni.replica_statuses()
    try:
        OmniBase.check_health(omni)
    except EngineDeadError as exc:
        named = f" ({', '.join(dead)})" if dead else ""
        # vLLM's class puts a sentence of its own before what it was raised with.
        return HealthReport(stages, replicas, f"{exc.args[-1]}{named}")
    return HealthReport(stages, replicas, None)
