"""Which connector moves payloads: a table of names, imported on use.

A new one (NIXL, Mooncake) is a class with this protocol and one line here.
"""

from __future__ import annotations

import importlib
import logging
from typing import Final, Protocol

from vllm_omni.distributed.omni_connectors.base import Receiver, Sender
from vllm_omni.distributed.omni_connectors.sender import OnFailure
from vllm_omni.errors import ConfigError

logger = logging.getLogger(__name__)

CONNECTORS: Final = {
    "zmq": "vllm_omni.distributed.omni_connectors.zmq_connector:ZmqConnector",
}
DEFAULT_CONNECTOR: Final = "zmq"


class Connector(Protocol):
    """Both halves of one replica's data plane, in one process."""

    address: str
    """Where other replicas reach it: the `data_address` of the replica's stage client."""
    sender: Sender
    receiver: Receiver

    def close(self) -> None:
        """Fail the streams that are open and give everything back. Repeatable."""


def log_failure(stream: str, message: str) -> None:
    """The default `on_failure`."""
    logger.warning("stream %s: %s", stream, message)


def open_connector(
    name: str,
    bind: str,
    *,
    on_failure: OnFailure = log_failure,
    kind: str = DEFAULT_CONNECTOR,
) -> Connector:
    """Open a replica's data plane.

    `name` is the replica's (`voice/0`), used in errors at the other end. `bind` is an address that
    only this replica uses: `RunDirectory.ipc("data")` on one host, `tcp://HOST:*` across hosts.

    Raises:
        ConfigError: no connector of this kind.
    """
    if kind not in CONNECTORS:
        raise ConfigError(f"no connector {kind!r}; known: {', '.join(sorted(CONNECTORS))}")
    module, _, attribute = CONNECTORS[kind].partition(":")
    connector: Connector = getattr(importlib.import_module(module), attribute)(
        name, bind, on_failure
    )
    return connector
