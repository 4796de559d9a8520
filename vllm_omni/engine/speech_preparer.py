"""The API loop's side of a stage that speaks: text and voice are checked before admission."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_omni.errors import BadRequestError
from vllm_omni.inputs.prompt import OmniPrompt
from vllm_omni.inputs.speech import SpeechParams, check_speech


class SpeechPreparer:
    """Validates what is to be spoken and how; the prompt itself goes on unchanged."""

    def __init__(self, stage: str, voices: Sequence[str], max_chars: int) -> None:
        """`voices` empty: the pipeline does not say, and the replica decides."""
        self._stage = stage
        self._voices = tuple(voices)
        self._max_chars = max_chars

    async def prepare(
        self, request_id: str, prompt: OmniPrompt, params: object, options: dict[str, object]
    ) -> OmniPrompt:
        """Check text and params; see `StagePreparer`."""
        self.check_params(params)
        if options:
            name = min(options)
            raise BadRequestError(f"a spoken text has no option {name!r}", field=name)
        if prompt.text is None:
            raise BadRequestError("there is no text to speak", field="input")
        if not prompt.text.strip():
            raise BadRequestError("the text to speak is empty", field="input")
        if len(prompt.text) > self._max_chars:
            raise BadRequestError(
                f"the text has {len(prompt.text)} characters, more than {self._max_chars}",
                field="input",
            )
        return prompt

    def check_params(self, params: object) -> None:
        """Raise BadRequestError for a voice, speed or seed that this stage does not have."""
        if not isinstance(params, SpeechParams):
            raise BadRequestError(
                f"params of stage {self._stage} are SpeechParams, not {type(params).__name__}",
                field="sampling_params",
            )
        if self._voices and params.voice not in self._voices:
            known = ", ".join(self._voices)
            raise BadRequestError(f"no voice {params.voice!r}; known: {known}", field="voice")
        check_speech(params)

    def source_context(self, params: object) -> dict[str, Any]:
        return {}

    def shutdown(self) -> None:
        """Nothing to give back."""
