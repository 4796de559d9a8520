"""What a replica's process is told when it is spawned. Picklable, frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vllm_omni.config.pipeline import Capture, StageKind


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpec:
    """One replica of one stage, with everything decided."""

    stage: str
    stage_id: int
    replica_id: int
    kind: StageKind
    model_dir: Path
    model_class: str | None
    devices: tuple[str, ...]
    """`("cpu",)` or `("cuda:0",)`; several for a replica of several ranks."""
    num_threads: int
    max_batch_size: int
    start_timeout_s: float
    engine_args: Mapping[str, object] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables set in the child only."""
    has_sources: bool = False
    """Other stages stream into this one: it opens a data-plane receiver."""
    bridges: tuple[str, ...] = ()
    """`module:name` of the stream bridges that feed it, imported before it is ready."""
    has_targets: bool = False
    """It streams into other stages: it opens a data-plane sender."""
    capture: Capture | None = None
    """AUTOREGRESSIVE: what its runner keeps of every forward for the stages it conditions."""
    hf_config: str | None = None
    """`StageConfig.hf_config`."""
    capabilities: str | None = None
    """`module:function` from model folder to `Capabilities`, for DIFFUSION."""
    memory_fraction: float | None = None
    """Share of each device's memory that it may take."""
    rank: int | None = None
    """Of a process that is one of several ranks of its replica; None: the replica's own."""
    incarnation: int = 1
    """Counts the starts of this replica. Part of the addresses it binds, so that what was meant
    for an earlier incarnation does not reach a later one."""

    @property
    def is_conditioned(self) -> bool:
        """Another autoregressive stage feeds its requests, position by position."""
        return self.kind is StageKind.AUTOREGRESSIVE and self.has_sources

    @property
    def measures_memory(self) -> bool:
        """What it takes of a device depends on what is free there while it starts."""
        is_given = self.engine_args.get("kv_cache_memory_bytes") is not None
        return self.kind is not StageKind.ONE_SHOT and not is_given

    @property
    def name(self) -> str:
        """`voice/0`, `voice/0 rank 1`: in process titles, log lines and metrics."""
        name = f"{self.stage}/{self.replica_id}"
        return name if self.rank is None else f"{name} rank {self.rank}"

    @property
    def incarnation_name(self) -> str:
        """`voice/0.1`: of the folder with its sockets."""
        return f"{self.name}.{self.incarnation}"
