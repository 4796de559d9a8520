"""One rank of a replica: its device, the pipeline on it, and the runner that drives it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Final, cast

from vllm_omni.config.diffusion_options import DiffusionEngineArgs
from vllm_omni.diffusion.distributed.ranks import OneRank, Ranks
from vllm_omni.diffusion.models.interface import (
    Capabilities,
    ExecutionMode,
    PipelineContext,
    RequestPipeline,
    StepPipeline,
)
from vllm_omni.diffusion.worker.attachments import Attachments, check_offload
from vllm_omni.diffusion.worker.device import Device
from vllm_omni.diffusion.worker.model_runner import ModelRunner
from vllm_omni.diffusion.worker.step_runner import StepRunner
from vllm_omni.diffusion.worker.warm_up import warm_up_batches
from vllm_omni.diffusion.worker.whole_runner import WholeRunner
from vllm_omni.engine.replica_spec import ReplicaSpec
from vllm_omni.errors import ConfigError

MAX_BATCH_SIZE: Final = 256


class Worker:
    """Made in the process that computes; loads everything. `ranks`: it is one of several.

    Raises:
        ConfigError: an option that this model or device cannot serve.
    """

    def __init__(
        self, spec: ReplicaSpec, progress: Callable[[str], None], ranks: Ranks | None = None
    ) -> None:
        args = DiffusionEngineArgs(**spec.engine_args)  # type: ignore[arg-type]
        ranks = ranks or OneRank()
        device = Device(spec.devices[ranks.rank])
        if spec.memory_fraction is not None:
            device.limit_memory(spec.memory_fraction)
        check_offload(args, device.name)
        self.pipeline = load_pipeline(spec, device, args, ranks)
        self.capabilities: Capabilities = self.pipeline.capabilities
        self.attachments = attachments = Attachments(
            self.pipeline.components, self.capabilities, args, device.name
        )
        if attachments.compiles and self.capabilities.mode is ExecutionMode.STEP:
            cast(StepPipeline, self.pipeline).prepare_for_compiler()
        self.max_batch_size = min(spec.max_batch_size, attachments.max_batch_size or MAX_BATCH_SIZE)
        self.max_prepared = args.max_prepared or 2 * self.max_batch_size
        if self.capabilities.mode is ExecutionMode.STEP and args.offload == "none":
            self._look_modulations_up(args)
        self.runner = make_runner(spec.stage, self.pipeline, device, attachments, args, ranks)
        progress("testing the pipeline")
        self.runner.self_test()
        if attachments.compiles and isinstance(self.runner, StepRunner):
            batches = warm_up_batches(self.capabilities, args.compile_sizes, self.max_batch_size)
            for i, batch in enumerate(batches):
                progress(f"compiling the pipeline ({i + 1} of {len(batches)})")
                self.runner.warm_up(batch)
        elif args.compile_sizes:
            raise ConfigError("compile_sizes: this replica compiles nothing")

    def _look_modulations_up(self, args: DiffusionEngineArgs) -> None:
        if args.modulations == "each_step":
            return
        pipeline = cast(StepPipeline, self.pipeline)
        pipeline.look_modulations_up(self.max_batch_size, self.max_prepared)


def load_pipeline(
    spec: ReplicaSpec, device: Device, args: DiffusionEngineArgs, ranks: Ranks
) -> StepPipeline | RequestPipeline:
    """Import the pipeline's class and load it.

    Raises:
        ConfigError: the class is not there, or cannot do with several devices.
    """
    module, _, name = (spec.model_class or "").partition(":")
    try:
        pipeline_class: type[StepPipeline | RequestPipeline] = getattr(
            importlib.import_module(module), name
        )
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"model class {spec.model_class!r} cannot be loaded: {error}") from error
    if len(spec.devices) > 1 and not pipeline_class.shares_rows:
        raise ConfigError(
            f"stages.{spec.stage}.devices: {name} does not share its steps out among several "
            f"devices; a replica has one, not {', '.join(spec.devices)}"
        )
    return pipeline_class(
        PipelineContext(
            model_dir=spec.model_dir,
            device=device.name,
            dtype=device.dtype(args.dtype),
            weights_on_host=args.offload != "none",
            load_format=args.load_format,
            ranks=ranks,
        )
    )


def make_runner(
    stage: str,
    pipeline: StepPipeline | RequestPipeline,
    device: Device,
    attachments: Attachments,
    args: DiffusionEngineArgs,
    ranks: Ranks,
) -> ModelRunner:
    """The runner for what the pipeline can do."""
    if pipeline.capabilities.mode is ExecutionMode.REQUEST:
        return WholeRunner(stage, pipeline, device, attachments)  # type: ignore[arg-type]
    return StepRunner(
        stage,
        pipeline,  # type: ignore[arg-type]
        device,
        attachments,
        cache_bytes=args.conditioning_cache_bytes,
        ranks=ranks,
    )
