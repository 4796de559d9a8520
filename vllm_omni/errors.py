"""Every error this package raises on purpose, with its HTTP status and whether to retry.

    OmniError
    +-- BadRequestError            400  the client's input; names the field
    |   +-- UnsupportedModalityError
    +-- UnsupportedMediaTypeError  415  a body that is neither JSON nor a form
    +-- NotFoundError              404  nothing of that name here
    +-- ConfigError                     the operator's input; stops the start
    |   +-- UnsupportedModelError
    |   +-- PlacementError
    |   +-- VersionError
    +-- StageStartError                 a replica did not become ready
    +-- StageUnavailableError      503  no live replica to place a request on
    +-- OverloadedError            503  admission refused, at once
    +-- DeadlineExceededError      504  a wait ended; says what it waited for
    +-- RequestFailedError         500  a stage failed this one request
    |   +-- ReplicaDiedError       503  the replica that held this request died
    |   +-- MemoryExhaustedError   503  a stage had no memory for this request just now
    +-- EngineStoppedError         503  the engine is shutting down or dead
    +-- UnknownReplicaError        404  an operator named a replica that is not there
    +-- ReplicaStateError          409  an operator asked for what the replica's state forbids

A `code` is stable: clients may depend on it.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import ClassVar


class OmniError(Exception):
    """Root of every error this package raises on purpose."""

    status: ClassVar[HTTPStatus] = HTTPStatus.INTERNAL_SERVER_ERROR
    retryable: ClassVar[bool] = False
    code: ClassVar[str] = "internal_error"
    """Stable machine-readable name, the `code` of OpenAI's error shape."""

    field: str | None = None
    """Name of the request field at fault, the `param` of OpenAI's error shape."""


class BadRequestError(OmniError, ValueError):
    """The client's input cannot be served; `field` says which part of it."""

    status = HTTPStatus.BAD_REQUEST
    code = "invalid_request"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class UnsupportedModalityError(BadRequestError):
    """The pipeline has no stage that reads or writes this modality."""

    code = "unsupported_modality"


class UnsupportedMediaTypeError(OmniError):
    """The body's content type is none that this route reads."""

    status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE
    code = "unsupported_media_type"


class NotFoundError(OmniError, LookupError):
    """There is nothing of the name that the client gave."""

    status = HTTPStatus.NOT_FOUND
    code = "not_found"


class ConfigError(OmniError, ValueError):
    """An operator's setting is unknown or impossible; the message names key and source."""

    code = "invalid_configuration"


class UnsupportedModelError(ConfigError):
    """No pipeline is registered for this checkpoint."""

    code = "unsupported_model"


class PlacementError(ConfigError):
    """The stages do not fit on the devices they were placed on."""

    code = "placement"


class VersionError(ConfigError):
    """The installed vLLM is not the release this package plugs into."""

    code = "version_mismatch"


class StageStartError(OmniError, RuntimeError):
    """A replica did not become ready; carries the replica's own error on one line."""

    code = "stage_start_failed"


class StageUnavailableError(OmniError, RuntimeError):
    """A request cannot be placed right now: no live, available replica."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    retryable = True
    code = "stage_unavailable"

    stage: str | None = None
    """The stage's name, where it is known; the text has its number."""


class OverloadedError(OmniError):
    """Admission refused the request at once; nothing was done for it."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    retryable = True
    code = "overloaded"


class DeadlineExceededError(OmniError, TimeoutError):
    """The request's deadline passed; the message says what it waited for."""

    status = HTTPStatus.GATEWAY_TIMEOUT
    retryable = True
    code = "deadline_exceeded"


class RequestFailedError(OmniError, RuntimeError):
    """A stage failed this request; its neighbours are untouched."""

    code = "request_failed"


class ReplicaDiedError(RequestFailedError):
    """The replica that held this request died."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    retryable = True
    code = "replica_died"


class MemoryExhaustedError(RequestFailedError):
    """A stage had no memory for this request, with half the batch neither; it still serves."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    retryable = True
    code = "out_of_memory"


class EngineStoppedError(OmniError, RuntimeError):
    """The engine is shutting down or its orchestrator has died."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    retryable = True
    code = "engine_stopped"


class UnknownReplicaError(OmniError, LookupError):
    """There is no replica of that stage and number."""

    status = HTTPStatus.NOT_FOUND
    code = "unknown_replica"


class ReplicaStateError(OmniError, RuntimeError):
    """The replica is in a state in which this cannot be done."""

    status = HTTPStatus.CONFLICT
    code = "replica_state"


ERRORS_BY_CODE: dict[str, type[OmniError]] = {}
"""Error classes by `code`: how an error that crossed a process is raised again."""


def _register(cls: type[OmniError]) -> None:
    ERRORS_BY_CODE.setdefault(cls.code, cls)
    for child in cls.__subclasses__():
        _register(child)


_register(OmniError)


def error_from_code(code: str, message: str, field: str | None = None) -> OmniError:
    """Rebuild an error that crossed a process boundary; unknown codes become OmniError."""
    error = ERRORS_BY_CODE.get(code, OmniError)(message)
    error.field = field
    return error
