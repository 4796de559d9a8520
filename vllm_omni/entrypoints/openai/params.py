"""Per-stage sampling params of a request, checked field by field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from pydantic import ValidationError
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind

from vllm_omni.config.pipeline import Modality, PipelineConfig, StageConfig, StageKind
from vllm_omni.entrypoints.openai.chat.protocol import SAMPLING_FIELDS, OmniChatRequest
from vllm_omni.errors import BadRequestError
from vllm_omni.inputs.speech import SpeechParams, check_speech

LIST_FIELD = "sampling_params_list"
SOUND_OPTION = "use_audio_in_video"
_RESERVED_PREFIX = "omni_"


def check_list(entries: Sequence[object] | None, pipeline: PipelineConfig) -> None:
    """One entry, perhaps null, for each stage of the pipeline."""
    if entries is not None and len(entries) != len(pipeline.stages):
        names = ", ".join(stage.name for stage in pipeline.stages)
        raise BadRequestError(
            f"{LIST_FIELD} needs one entry for each of the stages {names}", field=LIST_FIELD
        )


def apply_to_request(request: OmniChatRequest, entry: Mapping[str, Any] | None, index: int) -> None:
    """The entry of the prompt-reading stage becomes the request's fields, where it sets none."""
    if not entry:
        return
    values = dict(entry)
    if values.pop("detokenize", True) is not True:
        raise BadRequestError(
            "this stage's text is needed", field=f"{LIST_FIELD}[{index}].detokenize"
        )
    _refuse_unknown(values, SAMPLING_FIELDS, index)
    try:
        parsed = OmniChatRequest.model_validate({"messages": [], **values})
    except ValidationError as exc:
        first = exc.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        raise BadRequestError(str(first["msg"]), field=f"{LIST_FIELD}[{index}].{name}") from None
    for name in values:
        if name not in request.model_fields_set:
            setattr(request, name, getattr(parsed, name))


def stage_params(stage: StageConfig, entry: Mapping[str, Any], index: int) -> SamplingParams:
    """Params of a text stage beside the prompt-reading one."""
    if stage.kind is not StageKind.AUTOREGRESSIVE:
        raise BadRequestError(
            f"params of stage {stage.name!r} cannot be set here", field=f"{LIST_FIELD}[{index}]"
        )
    _refuse_unknown(entry, SAMPLING_FIELDS | {"detokenize"}, index)
    return _sampling_params({**stage.default_params, **entry}, index)


def merge_speech(base: SpeechParams, entry: Mapping[str, Any], field: str) -> SpeechParams:
    """`base` with the fields of `entry`; refuses unknown names and impossible values."""
    try:
        merged = msgspec.convert({**msgspec.to_builtins(base), **entry}, SpeechParams)
    except msgspec.ValidationError as exc:
        raise BadRequestError(str(exc), field=field) from None
    check_speech(merged, field)
    return merged


def check_extra_args(params: SamplingParams) -> None:
    """Refuse extra arguments that steer the engine: a client must not choose where chunks go."""
    for name in params.extra_args or {}:
        if name.startswith(_RESERVED_PREFIX):
            raise BadRequestError(f"{name!r} is reserved", field=f"vllm_xargs.{name}")


def check_processor_options(request: OmniChatRequest, native: frozenset[Modality]) -> None:
    """Of a processor's options a client may set whether a video's sound is heard, nothing else."""
    for name, value in (request.mm_processor_kwargs or {}).items():
        field = f"mm_processor_kwargs.{name}"
        if name != SOUND_OPTION or Modality.VIDEO not in native:
            raise BadRequestError(f"{name!r} is not a client's to set", field=field)
        if not isinstance(value, bool):
            raise BadRequestError("must be true or false", field=field)
    if request.media_io_kwargs:
        raise BadRequestError(
            "how media are read is not a client's to set", field="media_io_kwargs"
        )


def _sampling_params(values: Mapping[str, Any], index: int) -> SamplingParams:
    known = dict(values)
    if "max_completion_tokens" in known:
        known["max_tokens"] = known.pop("max_completion_tokens")
    try:
        return SamplingParams(**known, output_kind=RequestOutputKind.FINAL_ONLY)
    except VLLMValidationError as exc:
        name = f".{exc.parameter}" if exc.parameter else ""
        raise BadRequestError(str(exc.args[0]), field=f"{LIST_FIELD}[{index}]{name}") from None
    except (ValueError, TypeError) as exc:
        raise BadRequestError(str(exc), field=f"{LIST_FIELD}[{index}]") from None


def _refuse_unknown(values: Mapping[str, Any], known: frozenset[str], index: int) -> None:
    for name in values:
        if name not in known:
            raise BadRequestError(
                f"{name!r} is no sampling parameter", field=f"{LIST_FIELD}[{index}].{name}"
            )
