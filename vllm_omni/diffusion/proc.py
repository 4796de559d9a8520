"""The process of a diffusion replica: loads the pipeline, tests it, serves until it is stopped.

The main thread is the loop of `generation/replica_loop.py`: commands, decisions, reports. What
computes runs in the executor's lanes beside it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from vllm_omni.config.pipeline import Modality
from vllm_omni.diffusion import wire
from vllm_omni.diffusion.engine import DiffusionEngine
from vllm_omni.diffusion.executor.base import Executor
from vllm_omni.diffusion.models.interface import Capabilities
from vllm_omni.diffusion.sched.table import ItemTable
from vllm_omni.engine.messages import StageOutput
from vllm_omni.engine.replica_spec import ReplicaSpec
from vllm_omni.generation.replica_loop import ReplicaLoop, Shell, deadline_after, keep_loaded
from vllm_omni.generation.request import Figures
from vllm_omni.generation.wire import Abort, RawFrame, Utility


def run_diffusion(
    shell: Shell, /, *, command_address: str, report_path: str, data_address: str
) -> None:
    """Target of a diffusion replica's process; returns when it was told to stop."""
    from vllm_omni.diffusion.executor.in_process import InProcessExecutor
    from vllm_omni.diffusion.worker.worker import Worker

    spec = shell.spec
    shell.progress("loading the pipeline")
    worker = Worker(spec, shell.progress)
    with contextlib.ExitStack() as stack:
        replica = DiffusionReplica(spec, command_address, report_path)
        stack.callback(replica.close)
        executor = InProcessExecutor(worker.runner, replica.wake)
        stack.callback(executor.close)
        replica.attach(executor, worker.capabilities, worker.max_batch_size, worker.max_prepared)
        shell.figures = replica.figures
        shell.on_stop(replica.stop)
        keep_loaded()
        shell.ready({"data_address": None})
        replica.run()


class DiffusionReplica(ReplicaLoop):
    """The loop around the diffusion engine."""

    engine: DiffusionEngine

    def __init__(self, spec: ReplicaSpec, command_address: str, report_path: str) -> None:
        super().__init__(spec, command_address, report_path)

    def attach(
        self,
        executor: Executor,
        capabilities: Capabilities,
        max_batch_size: int,
        max_prepared: int,
    ) -> None:
        """Give the loop its engine, which wakes it."""
        self.engine = DiffusionEngine(
            self._spec.stage,
            executor,
            ItemTable(max_batch_size, max_prepared),
            mode=capabilities.mode,
            emits_video=capabilities.emits is Modality.VIDEO,
            clock=time.monotonic,
        )

    def figures(self) -> Figures:
        """The lanes' while they have work; else whether the loop itself turns."""
        lanes = self.engine.figures()
        return lanes if lanes["num_runnable"] else super().figures()

    def _obey(self, frames: Sequence[bytes]) -> None:
        command = wire.decode_command(frames[0])
        match command:
            case wire.Add():
                self._add(command, frames)
            case Abort(request_ids):
                self.engine.abort(request_ids)
            case Utility():
                self._answer(command)

    def _add(self, add: wire.Add, frames: Sequence[bytes]) -> None:
        try:
            request = wire.unpack_request(add.request, frames)
        except ValueError as error:
            self._refuse(add.request.request_id, f"the request is not readable: {error}")
            return
        self.engine.add(
            request,
            deadline_s=deadline_after(add.remaining_s),
            preview_interval=add.preview_interval,
        )

    def _pack(self, outputs: Sequence[StageOutput]) -> list[RawFrame]:
        return wire.pack_outputs(outputs)
