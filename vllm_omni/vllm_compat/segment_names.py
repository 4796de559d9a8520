"""Shared memory of an engine with several ranks has names that say whose it is.

Why:      the queues and locks between a core and its workers are named files in /dev/shm. Whoever
          is killed leaves them there, under random names that nobody can tell from those of others.
Why not a subclass: vLLM makes them by `multiprocessing`, in the core and in every worker, which
          takes no prefix for the names.
Breaks if: Python makes the names elsewhere than in `shared_memory._make_filename`, or of another
          setting than `semprefix`.
Remove when: vLLM names its segments, or unlinks them once every rank has opened them.
"""

from __future__ import annotations

import secrets
from multiprocessing import process, shared_memory

from vllm_omni import envs


def install() -> None:
    """Name this process's segments by the prefix in its environment, if there is one."""
    prefix = envs.segment_prefix()
    if prefix:
        process.current_process()._config["semprefix"] = f"/{prefix}lock"  # type: ignore[attr-defined]
        shared_memory._make_filename = lambda: f"/{prefix}{secrets.token_hex(8)}"  # type: ignore[attr-defined]
