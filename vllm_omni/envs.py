"""Every environment variable of this package: one typed function each, read when called.

They are for operators (paths, logging); whatever changes results is configuration.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

from vllm_omni.errors import ConfigError

CPU_KV_CACHE: Final = "VLLM_CPU_KVCACHE_SPACE"


SEGMENT_PREFIX: Final = "VLLM_OMNI_SEGMENT_PREFIX"


def segment_prefix() -> str:
    """`VLLM_OMNI_SEGMENT_PREFIX`: how the names of a replica's shared memory begin. Set by the
    server for the processes of a replica with several ranks, so that it can clean up after them."""
    return os.environ.get(SEGMENT_PREFIX, "")


def deploy_dir() -> Path | None:
    """`VLLM_OMNI_DEPLOY_DIR`: a folder of deploy YAMLs that is asked before the shipped ones."""
    name = "VLLM_OMNI_DEPLOY_DIR"
    raw = os.environ.get(name)
    if not raw:
        return None
    path = Path(raw).expanduser()
    if not path.is_dir():
        raise ConfigError(f"{name} must be a folder, got {raw!r}")
    return path


def cpu_kv_cache_bytes() -> int | None:
    """`VLLM_CPU_KVCACHE_SPACE`, vLLM's: GiB for the KV cache of each replica on CPU, where neither
    a deploy YAML nor a command line says otherwise."""
    raw = os.environ.get(CPU_KV_CACHE)
    if not raw:
        return None
    if not raw.isdecimal() or int(raw) < 1:
        raise ConfigError(f"{CPU_KV_CACHE} must be a whole number of GiB above 0, got {raw!r}")
    return int(raw) << 30


def data_dir() -> Path | None:
    """`VLLM_OMNI_DATA_DIR`: where a server keeps videos, unless `--data-dir` names a folder."""
    raw = os.environ.get("VLLM_OMNI_DATA_DIR")
    return Path(raw).expanduser() if raw else None


def admin_api_key() -> str | None:
    """`VLLM_OMNI_ADMIN_API_KEY`: the key of operators, unless `--admin-api-key` gives one."""
    return os.environ.get("VLLM_OMNI_ADMIN_API_KEY") or None


def log_level() -> int | None:
    """`VLLM_OMNI_LOG_LEVEL`: level of this package's log lines; None: that of vLLM's."""
    name = "VLLM_OMNI_LOG_LEVEL"
    raw = os.environ.get(name)
    if not raw:
        return None
    levels = logging.getLevelNamesMapping()
    if raw.upper() not in levels:
        raise ConfigError(f"{name} must be one of {', '.join(levels)}, got {raw!r}")
    return levels[raw.upper()]
