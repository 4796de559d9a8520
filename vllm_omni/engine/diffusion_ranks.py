"""The process of a diffusion replica of several ranks: the loop and the decisions.

It computes nothing and loads no model: `rank_processes.py` starts a process for each rank.
"""

from __future__ import annotations

import contextlib

from vllm_omni.diffusion.checks import load_capabilities
from vllm_omni.diffusion.executor.process_per_rank import ProcessPerRankExecutor
from vllm_omni.diffusion.proc import DiffusionReplica
from vllm_omni.engine.process_child import ChildShell
from vllm_omni.engine.rank_processes import RankProcesses
from vllm_omni.generation.replica_loop import keep_loaded


def run_diffusion_ranks(
    shell: ChildShell, /, *, command_address: str, report_path: str, data_address: str
) -> None:
    """Target of the replica's process; returns when it was told to stop. What ranks say to each
    other and to the replica goes through sockets whose names begin with `data_address`."""
    spec = shell.spec
    capabilities = load_capabilities(spec.capabilities, spec.model_dir, spec.stage)
    with contextlib.ExitStack() as stack:
        replica = DiffusionReplica(spec, command_address, report_path)
        stack.callback(replica.close)
        ranks = RankProcesses(spec, data_address, shell.progress, replica.wake)
        executor = ProcessPerRankExecutor(ranks)
        stack.callback(executor.close)
        limits = ranks.start()
        replica.attach(executor, capabilities, limits.max_batch_size, limits.max_prepared)
        shell.figures = replica.figures
        shell.on_stop(replica.stop)
        keep_loaded()
        shell.ready({"data_address": None})
        replica.run()
