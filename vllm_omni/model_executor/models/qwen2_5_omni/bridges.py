"""From the thinker to the talker: the sum of embedding and last hidden state of every token.

The talker reads the thinker's whole prompt, the token that opens the voice's speech and the first
token of the reply; each later token conditions one code. A token has its state one step after it
was written; the one that ended the reply has none and is not spoken.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vllm_omni.core.conditioning import (
    KIND_POSITIONS,
    KIND_PROMPT,
    KIND_ROWS,
    KIND_TOKENS,
    VOICE_KEY,
    ConditionedPrompt,
    Conditioning,
    ConditioningContext,
    Rows,
)
from vllm_omni.distributed.omni_connectors.base import Frame
from vllm_omni.engine.bridge import StreamEnd
from vllm_omni.engine.messages import StreamSource
from vllm_omni.model_executor.models.common.rows_data import (
    ids_of,
    positions_in,
    positions_of,
    rows_of,
)
from vllm_omni.model_executor.models.common.speakers import voice_id
from vllm_omni.model_executor.models.common.stop_guard import StopGuard

STATES: Final = "states"
"""Embedding and last hidden state of the thinker, side by side: `[positions, 2, width]`."""
TEXT: Final = "text"
"""Ids of the thinker's vocabulary, of those that the talker knows by heart."""
CODEC: Final = "codec"
"""Ids of the talker's vocabulary."""
NONE: Final = "none"
"""Zeros."""

EMBEDDING, HIDDEN = 0, 1
"""Order of the captured layers."""


class TalkerConditioning:
    """Satisfies `ConditioningBridge`."""

    def __init__(self, source: StreamSource, context: ConditioningContext) -> None:
        self._config = context.hf_config
        self._voice_token = voice_id(
            context.hf_config.speaker_id, context.extra_args.get(VOICE_KEY), "Chelsie"
        )
        self._prompt: npt.NDArray[np.int64] | None = None
        self._positions: npt.NDArray[np.int64] | None = None
        self._layers: tuple[list[npt.NDArray[Any]], list[npt.NDArray[Any]]] = ([], [])
        """Rows that came, each layer's in the order of their positions."""
        self._guard = StopGuard(source.context)
        self._num_speakable = 0
        """Tokens of the reply that may be spoken and the talker has not been given."""
        self._has_begun = False

    def feed(self, frame: Frame) -> Conditioning:
        kind = frame.meta["kind"]
        if kind == KIND_PROMPT:
            self._prompt = ids_of(frame)
        elif kind == KIND_POSITIONS:
            self._positions = positions_of(frame)
        elif kind == KIND_ROWS:
            self._layers[frame.meta["layer"]].extend(self._without_media(frame))
        elif kind == KIND_TOKENS:
            self._num_speakable += self._guard.feed(ids_of(frame).tolist())
        return self._advance()

    def end(self, end: StreamEnd) -> Conditioning:
        self._num_speakable += self._guard.end()
        result = self._advance()
        if not self._has_begun:
            return Conditioning(is_empty=True)
        result.steps.append(Rows(TEXT, np.array([self._config.tts_text_end_token_id])))
        result.is_last = True
        return result

    def _without_media(self, frame: Frame) -> npt.NDArray[Any]:
        """Rows of a frame; what media became is told by their hidden states alone."""
        rows = rows_of(frame)
        if frame.meta["layer"] != EMBEDDING or self._prompt is None:
            return rows
        positions = np.array(positions_in(frame))
        inside = positions < len(self._prompt)
        config = self._config
        media = (config.audio_token_index, config.image_token_index, config.video_token_index)
        rows[inside & np.isin(self._prompt[positions * inside], media)] = 0
        return rows

    def _advance(self) -> Conditioning:
        result = Conditioning()
        if not self._has_begun:
            if self._prompt is None or self._num_ready(len(self._prompt)) <= 0:
                return result
            result.prompt = self._make_prompt(self._prompt)
            self._num_speakable -= 1
            self._has_begun = True
        if num := self._num_ready():
            self._num_speakable -= num
            result.steps.append(self._take(num))
        return result

    def _num_ready(self, after: int = 0) -> int:
        """Tokens of the reply whose states are here and that may be spoken."""
        return min(min(map(len, self._layers)) - after, self._num_speakable)

    def _take(self, num: int) -> Rows:
        """The oldest states that were not given yet."""
        stacked = np.stack([np.stack(layer[:num]) for layer in self._layers], axis=1)
        for layer in self._layers:
            del layer[:num]
        return Rows(STATES, stacked)

    def _make_prompt(self, prompt: npt.NDArray[np.int64]) -> ConditionedPrompt:
        config, num = self._config, len(prompt)
        positions = self._positions
        if positions is not None:
            after = positions[:, -1:].max() + 1 + np.tile(np.arange(2), (3, 1))
            positions = np.concatenate([positions, after], axis=1)
        opening = [config.tts_codec_pad_token_id, config.tts_codec_start_token_id]
        return ConditionedPrompt(
            base=[Rows(NONE, np.empty(num)), Rows(CODEC, np.array(opening))],
            conditions=[
                self._take(num),
                Rows(TEXT, np.array([self._voice_token])),
                self._take(1),
            ],
            token_ids=[config.tts_codec_mask_token_id] * num + opening,
            positions=positions,
        )
