"""Shut connections of this process down, as a broken network would."""

from __future__ import annotations

import contextlib
import os
import socket

_DATA = "data"
"""Name of the data plane's sockets in a replica's folder (`RunDirectory.ipc`)."""


def cut_sockets(*, only_data: bool = True) -> int:
    """Cut those of the data plane, or all; returns how many.

    The descriptors stay open: only the connections are gone.
    """
    num_cut = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # no socket, or one that only listens
            borrowed = socket.socket(fileno=int(name))
            try:
                if borrowed.family is socket.AF_UNIX and (
                    not only_data or _is_data_connection(borrowed)
                ):
                    borrowed.shutdown(socket.SHUT_RDWR)
                    num_cut += 1
            finally:
                borrowed.detach()
    return num_cut


def _is_data_connection(one: socket.socket) -> bool:
    names = (one.getpeername(), one.getsockname())
    return any(os.path.basename(os.fsdecode(name)) == _DATA for name in names)
