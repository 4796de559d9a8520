"""Shut this process's connections on the data plane down, as a broken network would."""

from __future__ import annotations

import contextlib
import os
import socket

_DATA = "data"
"""Name of the data plane's sockets in a replica's folder (`RunDirectory.ipc`)."""


def cut_sockets() -> int:
    """Returns how many were cut. The descriptors stay open: only the connections are gone."""
    num_cut = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # no socket, or one that only listens
            borrowed = socket.socket(fileno=int(name))
            try:
                if _is_data_connection(borrowed):
                    borrowed.shutdown(socket.SHUT_RDWR)
                    num_cut += 1
            finally:
                borrowed.detach()
    return num_cut


def _is_data_connection(one: socket.socket) -> bool:
    names = (one.getpeername(), one.getsockname())
    return one.family is socket.AF_UNIX and any(
        os.path.basename(os.fsdecode(name)) == _DATA for name in names
    )
