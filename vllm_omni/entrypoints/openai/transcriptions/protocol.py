"""What a transcription's form may hold."""

from __future__ import annotations

from typing import Final

from starlette.datastructures import FormData
from vllm.entrypoints.speech_to_text.transcription.protocol import TranscriptionRequest

from vllm_omni.errors import BadRequestError

FORM_FIELDS: Final = frozenset(TranscriptionRequest.model_fields)
_NAMES: Final = frozenset(
    field.alias or name for name, field in TranscriptionRequest.model_fields.items()
)
"""As a form has them: a list's with two brackets."""


def check_form(form: FormData) -> None:
    """Refuse what would be ignored: unknown fields, and all but one value of a single one.

    Raises:
        BadRequestError: names the field.
    """
    for name in form:
        if name not in _NAMES:
            hint = f"; write {name}[]" if f"{name}[]" in _NAMES else ""
            raise BadRequestError(f"a transcription has no field {name!r}{hint}", field=name)
        if not name.endswith("[]") and len(form.getlist(name)) > 1:
            raise BadRequestError(f"{name} is given more than once", field=name)


def check_request(request: TranscriptionRequest) -> None:
    """Refuse values that this server's answers cannot show.

    Raises:
        BadRequestError: names the field.
    """
    if request.n != 1:
        raise BadRequestError("a recording has one transcription: n must be 1", field="n")
