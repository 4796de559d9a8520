"""What vocoders of streams of codes share: their options and the checks of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_omni.errors import BadRequestError, ConfigError
from vllm_omni.generation.model import ModelContext
from vllm_omni.generation.samples import NonFiniteAudioError, audio_chunk
from vllm_omni.inputs.prompt import OmniPrompt
from vllm_omni.inputs.speech import SpeechParams
from vllm_omni.model_executor.models.common.code_stream import ChunkRamp, Codes
from vllm_omni.outputs.media import AudioChunk

SAMPLE_RATE_HZ: Final = 24_000

Samples = NDArray[np.float32]

_DTYPES: Final = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}
"""By the names that vLLM takes."""
_LOAD_FORMATS: Final = ("auto", "safetensors", "dummy")


@dataclass(frozen=True, slots=True, kw_only=True)
class VocoderOptions:
    """A vocoder's `engine_args`."""

    ramp: ChunkRamp
    dtype: torch.dtype
    device: torch.device
    has_random_weights: bool
    more: Mapping[str, object]
    """Options of the family's own."""

    @classmethod
    def read(cls, context: ModelContext, more: Sequence[str] = ()) -> VocoderOptions:
        """Raises ConfigError for a name or a value that does not exist."""
        options = dict(context.options)
        ramp = ChunkRamp.parse(options.pop("chunk_ramp"))
        device = device_of(context.device)
        name = options.pop("dtype", "auto")
        if name == "auto":
            name = "float32" if device.type == "cpu" else "bfloat16"
        if name not in _DTYPES:
            raise ConfigError(f"dtype must be one of auto, {', '.join(_DTYPES)}; got {name!r}")
        load_format = options.pop("load_format", "auto")
        if load_format not in _LOAD_FORMATS:
            raise ConfigError(
                f"load_format must be one of {', '.join(_LOAD_FORMATS)}; got {load_format!r}"
            )
        for unknown in sorted(options.keys() - set(more)):
            raise ConfigError(f"the vocoder has no option {unknown!r}")
        return cls(
            ramp=ramp,
            dtype=_DTYPES[str(name)],
            device=device,
            has_random_weights=load_format == "dummy",
            more=options,
        )


def device_of(name: str) -> torch.device:
    """The torch device of a replica, whose process sees no other of its kind."""
    return torch.device(name.partition(":")[0])


def read_part_config(model_dir: Path, part: str) -> Any:
    """The configuration of one part of a checkpoint, as transformers' class.

    Raises:
        ConfigError: it cannot be read, or has no such part.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the config of {model_dir}: {error}") from error
    found = getattr(config, part, None)
    if found is None:
        raise ConfigError(f"the config of {model_dir} has no {part}")
    return found


def speech_params(prompt: object, params: object) -> SpeechParams:
    """What a request asks of a vocoder that is fed by a stream.

    Raises:
        BadRequestError: it brings something else, or asks for another speed.
    """
    if params is None:
        params = SpeechParams()
    if not isinstance(params, SpeechParams):
        raise BadRequestError(f"a vocoder takes SpeechParams, not {type(params).__name__}")
    if params.speed != 1.0:
        raise BadRequestError("this model speaks at its own speed; speed must be 1", field="speed")
    is_empty = isinstance(prompt, OmniPrompt) and not (
        prompt.text or prompt.token_ids or prompt.audio
    )
    if prompt is not None and not is_empty:
        raise BadRequestError("a vocoder is fed by the stage before it", field="input")
    return params


def check_codes(codes: Codes, num_groups: int, codebook_size: int) -> None:
    """On a GPU an index beyond the table ends the process, so it is found here.

    Raises:
        ValueError: not what this vocoder decodes.
    """
    if codes.shape[1] != num_groups:
        raise ValueError(f"{codes.shape[1]} groups of codes where the vocoder has {num_groups}")
    if codes.size and (codes.min() < 0 or codes.max() >= codebook_size):
        raise ValueError(f"a code is outside of the codebook of {codebook_size}")


def audio_of(parts: Sequence[Samples]) -> AudioChunk | NonFiniteAudioError | None:
    """The samples of one request's forward as its result, which may be its error."""
    if not parts:
        return None
    try:
        return audio_chunk(np.concatenate(parts), SAMPLE_RATE_HZ)
    except NonFiniteAudioError as error:
        return error
