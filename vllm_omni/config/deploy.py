"""Where and how stages run: what an operator decides. Frozen, and merged only by `resolve.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vllm_omni.config.pipeline import PipelineConfig, StageConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDeploy:
    """Where and how the replicas of one stage run."""

    num_replicas: int = 1
    devices: tuple[str, ...] = ()
    """One device list per replica, `cpu` or `cuda:0` or `cuda:0,1`; empty: the platform decides."""
    num_threads: int | None = None
    """CPU threads of one replica; None: the platform decides."""
    memory_fraction: float | None = None
    """Share of the device's memory a replica may take; added up per device before loading."""
    max_batch_size: int = 8
    """ONE_SHOT and DIFFUSION: requests that share a forward. AUTOREGRESSIVE: `max_num_seqs`."""
    start_timeout_s: float = 300.0
    """A replica that makes no progress for this long while it loads counts as failed."""
    engine_args: Mapping[str, object] = field(default_factory=dict)
    """Engine options by their own names; for AUTOREGRESSIVE vLLM's engine arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Bounds on what the server takes on. Every wait ends, every queue is bounded."""

    max_in_flight: int = 256
    """Requests admitted at once; one more is refused with 503."""
    request_timeout_s: float = 600.0
    """Deadline of a request that names none."""
    drain_timeout_s: float = 10.0
    """How long SIGTERM waits for running requests."""
    max_audio_bytes: int = 25 * 1024 * 1024
    """Encoded bytes of one audio item."""
    max_audio_s: float = 120.0
    """Length of one audio item."""
    max_body_bytes: int = 96 * 1024 * 1024
    """Bytes of one HTTP request's body, all its media together."""
    max_media_items: int = 16
    """Media items in one request."""
    max_speech_chars: int = 4096
    """Characters of a text to be spoken."""
    media_fetch: str = "deny"
    """`deny`: media come as data URLs only. `public`: http(s) URLs that resolve to public
    addresses are fetched. A host name list separated by commas: only those hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedStage:
    """One stage with everything decided."""

    stage_id: int
    config: StageConfig
    deploy: StageDeploy
    model_dir: Path
    """Folder of this stage's checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """Pipeline + deploy + command line, merged. Nobody changes it afterwards."""

    model_dir: Path
    pipeline: PipelineConfig
    stages: tuple[ResolvedStage, ...]
    limits: ServerLimits
    provenance: Mapping[str, str] = field(default_factory=dict)
    """Dotted key (`stages.thinker.engine_args.dtype`) to who set it."""
