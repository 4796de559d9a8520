"""A private folder for the sockets of one replica, removed at exit or, stale, at the next start.
Segments of shared memory whose names begin with its `segment_prefix` go with it.

    <temporary folder>/vllm-omni-<uid>/<name>-<random>/    mode 0700, locked while its owner lives

The lock is a kernel `flock` on a file inside, so it falls with its owner whatever way that dies,
and it tells live from stale also between containers that share a temporary folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from vllm_omni.errors import ConfigError

logger = logging.getLogger(__name__)

_OWNER_FILE = "owner"
_MAX_SOCKET_PATH = 107
"""Longest path of a Unix socket on Linux."""
_LONGEST_SOCKET_NAME = 16
SHARED_MEMORY: Final = Path("/dev/shm")


_live: Final[set[RunDirectory]] = set()
"""The folders of this process."""


class RunDirectory:
    """One private folder. Only its creator's process may call `remove`."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd
        _live.add(self)

    @classmethod
    def create(cls, name: str, base: Path | None = None) -> RunDirectory:
        """Make a fresh folder; folders whose owners are gone are removed on the way.

        Raises:
            ConfigError: the base folder belongs to someone else, or its path is too long.
        """
        base = base or Path(tempfile.gettempdir()) / f"vllm-omni-{os.getuid()}"
        _check_base(base)
        with _locked(base):
            _remove_stale(base)
            prefix = name.replace("/", "-")[:24] + "-"
            path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
            if len(os.fsencode(path)) + 1 + _LONGEST_SOCKET_NAME > _MAX_SOCKET_PATH:
                path.rmdir()
                raise ConfigError(f"TMPDIR is too long for a socket's path: {path}")
            lock_fd = os.open(path / _OWNER_FILE, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock_fd, fcntl.LOCK_EX)
        return cls(path, lock_fd)

    def socket_path(self, name: str) -> str:
        """The path of a Unix socket in this folder."""
        assert len(name) <= _LONGEST_SOCKET_NAME, f"socket name {name!r} is too long"
        return str(self.path / name)

    def ipc(self, name: str) -> str:
        """A ZeroMQ address of a socket in this folder."""
        return f"ipc://{self.socket_path(name)}"

    @property
    def segment_prefix(self) -> str:
        """How the names of shared memory begin that goes with this folder."""
        return _segment_prefix(self.path)

    def remove(self) -> None:
        """Remove the folder and what is in it. Repeatable."""
        if self._lock_fd < 0:
            return
        _live.discard(self)
        _remove(self.path)
        os.close(self._lock_fd)
        self._lock_fd = -1


def remove_run_directories() -> None:
    """Remove every folder of this process, which is about to end in a hurry."""
    for directory in list(_live):
        directory.remove()


def _segment_prefix(path: Path) -> str:
    return f"vllm-omni-{path.name.rpartition('-')[2]}-"


def _remove(path: Path) -> None:
    """Remove a folder and the shared memory of those who worked in it.

    That of a lock is called `sem.` and its name. vLLM's ranks on CPU name theirs like the file in
    which they met.
    """
    prefix = _segment_prefix(path)
    prefixes = (prefix, f"sem.{prefix}", *(f"{met.name}-" for met in path.glob("vllm_dist_*")))
    shutil.rmtree(path, ignore_errors=True)
    # Not by patterns: Python keeps thousands of those it has seen, and these are never seen again.
    for segment in SHARED_MEMORY.iterdir() if SHARED_MEMORY.is_dir() else ():
        if segment.name.startswith(prefixes):
            with contextlib.suppress(OSError):
                segment.unlink()


def _check_base(base: Path) -> None:
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = base.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"{base} must be a folder of this user with mode 0700")


@contextlib.contextmanager
def _locked(base: Path) -> Iterator[None]:
    fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _remove_stale(base: Path) -> None:
    for path in base.iterdir():
        try:
            fd = os.open(path / _OWNER_FILE, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            fd = -1  # its owner died between the two steps of `create`
        except OSError:
            continue
        try:
            if fd >= 0:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # alive
        else:
            logger.info("removing %s, left behind by a killed process", path)
            _remove(path)
        finally:
            if fd >= 0:
                os.close(fd)
