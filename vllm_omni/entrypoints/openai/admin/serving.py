"""What operators may do over HTTP, and the key that says who is one."""

from __future__ import annotations

import hashlib
import hmac
from http import HTTPStatus
from typing import Final

from starlette.datastructures import Headers

from vllm_omni.engine.omni_engine import SupervisorAction
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.openai.errors import AnsweredError, HttpError
from vllm_omni.entrypoints.openai.replica_status import status_fields

ADMIN_KEY_HEADER: Final = "X-Admin-Key"
"""Beside `Authorization`, which holds the API key where one is configured: an operator needs both,
and neither opens what the other protects."""


class AdminServing:
    """Replicas in the hands of an operator."""

    def __init__(self, omni: AsyncOmni, admin_key: str | None) -> None:
        self._omni = omni
        self._key_hash = _hash(admin_key) if admin_key else None

    def authorize(self, headers: Headers) -> None:
        """Let operators through.

        Raises:
            AnsweredError: 403 when the server has no admin key, 401 when this is not it.
        """
        if self._key_hash is None:
            raise AnsweredError(
                HttpError(
                    HTTPStatus.FORBIDDEN,
                    "operators' routes are off: this server was started without --admin-api-key "
                    "(or VLLM_OMNI_ADMIN_API_KEY)",
                    "PermissionDeniedError",
                    "admin_disabled",
                )
            )
        given = headers.get(ADMIN_KEY_HEADER, "")
        if not hmac.compare_digest(_hash(given), self._key_hash):
            raise AnsweredError(
                HttpError(
                    HTTPStatus.UNAUTHORIZED,
                    f"the header {ADMIN_KEY_HEADER} is missing or wrong",
                    "AuthenticationError",
                    "invalid_admin_key",
                )
            )

    def replicas(self) -> dict[str, object]:
        """Every replica, in the order of stages and slots."""
        statuses = self._omni.replica_statuses()
        return {"replicas": [{"stage": one.stage, **status_fields(one)} for one in statuses]}

    async def act(self, action: SupervisorAction, stage: str, replica_id: int) -> dict[str, object]:
        """Begin an action; what the replica is at now.

        Raises:
            UnknownReplicaError: there is no such replica.
            ReplicaStateError: its state forbids it.
        """
        status = await self._omni.supervise(action, stage, replica_id)
        return {"stage": status.stage, **status_fields(status)}


def _hash(key: str) -> bytes:
    """Of a fixed length, so that comparing tells nothing about the key's."""
    return hashlib.sha256(key.encode()).digest()
