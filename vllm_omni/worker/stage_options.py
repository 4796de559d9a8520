"""What our runner has to do in a stage beyond vLLM's own: travels in vLLM's `additional_config`.

Part of the key of vLLM's compile cache there, as what is captured changes the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from vllm_omni.config.pipeline import CaptureScope

STAGE_WORKERS: Final = {
    "cpu": "vllm_omni.worker.cpu_worker.StageCPUWorker",
    "cuda": "vllm_omni.worker.gpu_worker.StageGPUWorker",
}
"""Values of `worker_cls` by type of device."""
CPU_WORKER: Final = "vllm_omni.worker.cpu_worker.SeededCPUWorker"
"""That of all other stages on a CPU."""

_KEY: Final = "vllm_omni_stage"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions:
    """See the module."""

    capture_layers: tuple[int, ...] | None = None
    """Layers whose rows are kept; None: this stage conditions no other."""
    capture_scope: CaptureScope | None = None
    is_conditioned: bool = False
    """Its inputs are made of its own codes and of another stage's rows."""

    def as_config(self) -> dict[str, Any]:
        """As `additional_config`."""
        return {
            _KEY: {
                "capture_layers": list(self.capture_layers or ()),
                "capture_scope": str(self.capture_scope) if self.capture_scope else None,
                "is_conditioned": self.is_conditioned,
            }
        }

    @classmethod
    def of(cls, additional_config: Mapping[str, Any]) -> StageOptions:
        """Read back what `as_config` made; the defaults for other stages."""
        found = additional_config.get(_KEY)
        if found is None:
            return cls()
        scope = found["capture_scope"]
        return cls(
            capture_layers=tuple(found["capture_layers"]) if scope else None,
            capture_scope=CaptureScope(scope) if scope else None,
            is_conditioned=found["is_conditioned"],
        )
