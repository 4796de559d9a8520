"""What `Omni` and `AsyncOmni` share: configuration, engine, preparers, admission, health.

Lives in the API process. Starting blocks until every replica is ready; `shutdown` is the one
exit and may be called at any time, more than once.
"""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni.config.deploy import ResolvedConfig
from vllm_omni.config.pipeline import Modality, PipelineConfig, Task, plan_route
from vllm_omni.engine.admission import Admission
from vllm_omni.engine.launcher import FactoryLauncher, StageLauncher
from vllm_omni.engine.metrics_protocol import EngineMetrics, NullMetrics
from vllm_omni.engine.omni_engine import OmniEngine
from vllm_omni.engine.replica_state import ReplicaStatus
from vllm_omni.engine.stage_client import StageClient, StagePreparer
from vllm_omni.engine.stage_pool import StagePool
from vllm_omni.entrypoints.entry_prompts import EntryPrompts
from vllm_omni.entrypoints.output_collector import OutputRouter
from vllm_omni.entrypoints.stage_params import StageParams
from vllm_omni.errors import ConfigError, EngineStoppedError, UnsupportedModalityError

logger = logging.getLogger(__name__)

DEAD_TEXT = "Orchestrator process is not alive"


class OmniBase:
    """One pipeline, served. Everything the front ends need, and nothing about their style."""

    def __init__(
        self,
        config: ResolvedConfig,
        *,
        launcher: StageLauncher | None = None,
        metrics: EngineMetrics | None = None,
    ) -> None:
        """Prepare; starts nothing."""
        self.config = config
        self.pipeline: PipelineConfig = config.pipeline
        self.limits = config.limits
        self._launcher = launcher or FactoryLauncher()
        self.metrics = metrics or NullMetrics()
        self.engine = OmniEngine(
            config,
            self._launcher.replica_specs(config),
            self._launcher.start_replica,
            metrics=self.metrics,
        )
        self._admission = Admission(config.limits.max_in_flight, self.metrics)
        self._router = OutputRouter(
            self.engine.outbox, [stage.name for stage in config.pipeline.stages]
        )
        self._params = StageParams(config.pipeline)
        self._entry_prompts = EntryPrompts(config.pipeline)
        self._preparers: list[StagePreparer] = []
        self._all_outputs = _reachable_outputs(config.pipeline)

    def start(self) -> None:
        """Start every replica and preparer, side by side; returns when all are ready. Repeatable.

        Raises:
            OmniError: the first that failed; whatever had started is stopped again.
        """
        if self._preparers:
            return
        ready = self.engine.start()
        made: list[concurrent.futures.Future[StagePreparer]] = []
        try:
            with concurrent.futures.ThreadPoolExecutor(thread_name_prefix="preparer") as threads:
                made += [
                    threads.submit(self._launcher.make_preparer, stage, self.config)
                    for stage in self.config.stages
                ]
                waited: list[concurrent.futures.Future[Any]] = [ready, *made]
                done, _ = concurrent.futures.wait(
                    waited, return_when=concurrent.futures.FIRST_EXCEPTION
                )
                for future in done:
                    future.result()
        except BaseException:
            self._preparers = [one.result() for one in made if one.done() and not one.exception()]
            self.shutdown()
            raise
        self._preparers = [one.result() for one in made]

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop everything; running requests get `timeout` seconds to end. Repeatable."""
        self.engine.shutdown(timeout or 0.0)
        for preparer in self._preparers:
            preparer.shutdown()

    def preparer(self, stage_name: str) -> StagePreparer:
        """The API's side of a stage; KeyError when there is none of that name."""
        return self._preparers[self.pipeline.stage_id(stage_name)]

    @property
    def is_running(self) -> bool:
        """The orchestrator's thread is alive. Dead stages do not count: others may serve."""
        return self.engine.is_alive()

    @property
    def errored(self) -> bool:
        """The orchestrator's thread is not alive."""
        return not self.engine.is_alive()

    @property
    def dead_error(self) -> BaseException:
        """Why nothing can be served any more."""
        return self._router.dead_error or EngineStoppedError(DEAD_TEXT)

    def check_health(self) -> None:
        """Raise EngineDeadError when the orchestrator is dead or a stage has no live replica."""
        if not self.is_running:
            raise EngineDeadError(DEAD_TEXT)
        for pool in getattr(self.engine, "stage_pools", ()):
            if self._stage_has_no_live_replica(pool):
                raise EngineDeadError(f"Stage-{pool.stage_id} has no live replica")

    def dead_stages(self) -> list[str]:
        """Names of the stages without a live replica."""
        return [
            pool.name for pool in self.engine.stage_pools if self._stage_has_no_live_replica(pool)
        ]

    def replica_statuses(self) -> list[ReplicaStatus]:
        """What each replica is at: state, restarts, last error, next attempt."""
        return self.engine.supervisor.statuses()

    @staticmethod
    def _replica_is_dead(client: StageClient | None) -> bool:
        """Whether a slot serves nothing: empty, without a way to ask, or dead by its own word."""
        check = getattr(client, "check_health", None)
        if not callable(check):
            return True
        try:
            check()
        except EngineDeadError:
            return True
        return False

    @staticmethod
    def _live_replica_count(pool: StagePool) -> int:
        return sum(not OmniBase._replica_is_dead(client) for client in list(pool.clients))

    @staticmethod
    def _stage_has_no_live_replica(pool: StagePool) -> bool:
        return len(pool.clients) > 0 and OmniBase._live_replica_count(pool) == 0

    def _outputs_wanted(self, modalities: Sequence[str] | None) -> frozenset[Modality]:
        """The modalities a request asks for; all that the pipeline writes when it names none."""
        if modalities is None:
            return self._all_outputs
        try:
            return frozenset(Modality(modality) for modality in modalities)
        except ValueError as error:
            raise UnsupportedModalityError(str(error), field="modalities") from None


def config_of(
    front: str,
    model: str | Path | None,
    config: ResolvedConfig | None,
    *,
    deploy_config: str | Path | None,
    stage_overrides: Sequence[str],
    engine_options: dict[str, object],
) -> ResolvedConfig:
    """What a front end of the library serves: the config it is given, or a model's.

    Raises:
        ConfigError: neither or both, or an option is wrong.
    """
    if (model is None) == (config is None):
        raise ConfigError(f"{front} takes either a model or a resolved config")
    if config is not None:
        return config
    assert model is not None
    from vllm_omni.config.resolve import resolve

    return resolve(
        model,
        deploy_config=deploy_config,
        stage_overrides=stage_overrides,
        engine_options=engine_options,
    )


def _reachable_outputs(pipeline: PipelineConfig) -> frozenset[Modality]:
    """Everything a chat with this pipeline can write."""
    if Task.CHAT not in pipeline.entries:
        return frozenset()
    reachable = set()
    for modality in Modality:
        try:
            plan_route(pipeline, Task.CHAT, frozenset(), frozenset({modality}))
        except UnsupportedModalityError:
            continue
        reachable.add(modality)
    return frozenset(reachable)
