"""The process of a one-shot replica: loads the model, tests it, then serves until it is stopped.

One thread does everything (`replica_loop.py`): it reads commands, runs forwards, sends outputs.
Only the data plane and the heartbeat have threads beside it.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Sequence

from vllm_omni.distributed.omni_connectors.factory import Connector, open_connector
from vllm_omni.engine.messages import StageOutput
from vllm_omni.engine.replica_spec import ReplicaSpec
from vllm_omni.errors import ConfigError
from vllm_omni.generation import wire
from vllm_omni.generation.engine import OneShotEngine, load_bridge
from vllm_omni.generation.model import ModelContext, OneShotModel
from vllm_omni.generation.replica_loop import ReplicaLoop, Shell, deadline_after, keep_loaded


def run_one_shot(
    shell: Shell, /, *, command_address: str, report_path: str, data_address: str
) -> None:
    """Target of a one-shot replica's process; returns when it was told to stop."""
    spec = shell.spec
    shell.progress("loading the model")
    model = load_model(spec)
    shell.progress("testing the model")
    model.self_test()
    for bridge in spec.bridges:  # so that no request waits for an import
        load_bridge(bridge)
    with contextlib.ExitStack() as stack:
        connector = None
        if spec.has_sources:
            connector = open_connector(spec.name, data_address)
            stack.callback(connector.close)
        replica = OneShotReplica(spec, model, connector, command_address, report_path)
        stack.callback(replica.close)
        shell.figures = replica.figures
        shell.on_stop(replica.stop)
        keep_loaded()
        shell.ready({"data_address": connector.address if connector is not None else None})
        replica.run()


def load_model(spec: ReplicaSpec) -> OneShotModel:
    """Import the model's class and load it.

    Raises:
        ConfigError: the class is not there.
    """
    module, _, name = (spec.model_class or "").partition(":")
    try:
        model_class: type[OneShotModel] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"model class {spec.model_class!r} cannot be loaded: {error}") from error
    return model_class(
        ModelContext(
            model_dir=spec.model_dir,
            device=spec.devices[0],
            num_threads=spec.num_threads,
            options=spec.engine_args,
        )
    )


class OneShotReplica(ReplicaLoop):
    """The loop around the one-shot engine."""

    engine: OneShotEngine

    def __init__(
        self,
        spec: ReplicaSpec,
        model: OneShotModel,
        connector: Connector | None,
        command_address: str,
        report_path: str,
    ) -> None:
        super().__init__(spec, command_address, report_path)
        self.engine = OneShotEngine(
            spec.stage,
            model,
            spec.max_batch_size,
            receiver=connector.receiver if connector is not None else None,
            clock=time.monotonic,
            wake=self.wake,
        )

    def _obey(self, frames: Sequence[bytes]) -> None:
        command = wire.decode_command(frames[0])
        match command:
            case wire.Add():
                self._add(command, frames)
            case wire.Abort(request_ids):
                self.engine.abort(request_ids)
            case wire.SourceEnded(request_id, stream):
                self.engine.source_ended(request_id, stream)
            case wire.Utility():
                self._answer(command)

    def _add(self, add: wire.Add, frames: Sequence[bytes]) -> None:
        try:
            prompt = wire.unpack_prompt(add.prompt, frames) if add.prompt is not None else None
        except ValueError as error:
            self._refuse(add.request_id, f"the prompt is not readable: {error}")
            return
        deadline_s = deadline_after(add.remaining_s)
        self.engine.add(add.request_id, prompt, add.params, add.sources, deadline_s)

    def _pack(self, outputs: Sequence[StageOutput]) -> list[wire.RawFrame]:
        return wire.pack_outputs(outputs)
