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
    """One device list per replica, `cpu` or `cuda:0` or `cuda:0,1`; empty: the platform decides. A
    DIFFUSION replica has a rank on each of its devices, which share out the rows of a step."""
    num_threads: int | None = None
    """CPU threads of one replica; None: the platform decides."""
    memory_fraction: float | None = None
    """Share of the device's memory a replica may take; added up per device before loading."""
    yields_device: bool = False
    """Work of the other stages on its device goes first. Means something on NVIDIA GPUs where MPS
    runs, which has clients of two priorities; elsewhere nothing."""
    max_batch_size: int = 8
    """ONE_SHOT and DIFFUSION: requests that share a forward. AUTOREGRESSIVE: `max_num_seqs`."""
    start_timeout_s: float = 300.0
    """A replica that makes no progress for this long while it loads counts as failed."""
    max_restarts: int = 3
    """Restarts of one replica within `restart_period_s`; beyond them it stays down. 0: none."""
    restart_period_s: float = 300.0
    """Time within which restarts count against `max_restarts`."""
    restart_backoff_s: float = 1.0
    """Wait before the first restart; doubled with each further one in the period."""
    max_restart_backoff_s: float = 60.0
    """Longest wait before a restart."""
    stall_timeout_s: float = 60.0
    """A replica is killed when it is silent, or makes no progress on work it could do, for this
    long. 0: never."""
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
    resubmit: str = "live"
    """What becomes of a request whose replica died before anything of it reached the client.
    `live`: it is submitted once more when another replica can take it. `wait`: also when one is
    expected back before the request's deadline. `never`: it fails."""
    replica_drain_timeout_s: float = 30.0
    """How long a replica that an operator restarts may finish what it has."""
    max_audio_bytes: int = 25 * 1024 * 1024
    """Encoded bytes of one audio item."""
    max_audio_s: float = 120.0
    """Length of one audio item."""
    max_image_bytes: int = 20 * 1024 * 1024
    """Encoded bytes of one image."""
    max_image_pixels: int = 33_554_432
    """Width times height of one image, checked before it is decoded."""
    max_video_bytes: int = 64 * 1024 * 1024
    """Encoded bytes of one video."""
    max_video_s: float = 300.0
    """Length of one video."""
    max_video_pixels: int = 536_870_912
    """Pixels of all frames that are taken of one video, two for each second; each costs three
    bytes when it is decoded."""
    max_queued_videos: int = 32
    """Video jobs that have not ended; one more is refused with 503."""
    max_stored_videos: int = 1000
    """Video jobs that are kept; the oldest that have ended make room for new ones."""
    max_stored_video_bytes: int = 20 * 1024 * 1024 * 1024
    """Bytes of the videos that are kept; the oldest make room for new ones."""
    video_timeout_s: float = 3600.0
    """Deadline of a video job, from when the engine takes it up."""
    video_expiry_s: float = 86400.0
    """How long a finished video is kept."""
    max_body_bytes: int = 96 * 1024 * 1024
    """Bytes of one HTTP request's body, all its media together."""
    max_input_bytes: int = 4 * 1024 * 1024 * 1024
    """Bytes of the bodies and the decoded media that all requests hold at once; more is refused
    with 503."""
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
