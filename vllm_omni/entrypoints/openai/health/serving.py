"""Health as the engine sees it, stage by stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni.entrypoints.omni_base import OmniBase


@dataclass(frozen=True, slots=True)
class HealthReport:
    """What /health says."""

    stages: Mapping[str, str]
    """`ready` or `dead` by stage name."""
    error: str | None
    """The first thing that is wrong."""

    def body(self) -> dict[str, object]:
        if self.error is None:
            return {"status": "healthy", "stages": dict(self.stages)}
        return {"status": "unhealthy", "stages": dict(self.stages), "error": self.error}


def health_of(omni: OmniBase) -> HealthReport:
    """Look at every stage; costs no round trip."""
    dead = omni.dead_stages()
    stages = {
        stage.name: "dead" if stage.name in dead else "ready" for stage in omni.pipeline.stages
    }
    try:
        OmniBase.check_health(omni)
    except EngineDeadError as exc:
        named = f" ({', '.join(dead)})" if dead else ""
        # vLLM's class puts a sentence of its own before what it was raised with.
        return HealthReport(stages, f"{exc.args[-1]}{named}")
    return HealthReport(stages, None)
