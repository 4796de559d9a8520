"""From the thinker to the talker: its prompt, then one row of text for each step.

The talker hears the user's turns (words as their projected embeddings, media as a projected layer
of the thinker), then the beginning of the reply with the voice's token, and from then on one token
of the reply for each frame: the text ends long before the sound.
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
from vllm_omni.model_executor.models.qwen3_omni.turns import Turns, turns_of

TEXT: Final = "text"
"""Ids of the thinker's vocabulary."""
MEDIA: Final = "media"
"""Rows of the thinker's layer that the talker accepts."""
CODEC: Final = "codec"
"""Ids of the talker's vocabulary."""
NONE: Final = "none"
"""Zeros."""

_NUM_HEAD: Final = 3
"""`<|im_start|>assistant` and a new line."""
_NUM_PAD: Final = 4
"""Positions of the codec's own beginning that no text goes with."""


class TalkerConditioning:
    """Satisfies `ConditioningBridge`."""

    def __init__(self, source: StreamSource, context: ConditioningContext) -> None:
        self._config = context.hf_config
        self._voice_id = voice_id(
            context.hf_config.speaker_id, context.extra_args.get(VOICE_KEY), "ethan"
        )
        self._turns: Turns | None = None
        self._media: dict[int, npt.NDArray[Any]] = {}
        """Rows by position of the thinker's prompt."""
        self._positions: npt.NDArray[np.int64] | None = None
        self._guard = StopGuard(source.context)
        self._held: list[int] = []
        """Tokens of the reply that may belong to a stop string."""
        self._text: list[int] = []
        """Tokens that may be spoken and the talker has not been given."""
        self._has_begun = False

    def feed(self, frame: Frame) -> Conditioning:
        kind = frame.meta["kind"]
        if kind == KIND_PROMPT:
            self._turns = turns_of(ids_of(frame), self._config)
            self._text += self._turns.reply[_NUM_HEAD:].tolist()
        elif kind == KIND_ROWS:
            self._media.update(zip(positions_in(frame), rows_of(frame), strict=True))
        elif kind == KIND_POSITIONS:
            self._positions = positions_of(frame)
        elif kind == KIND_TOKENS:
            token_ids = ids_of(frame).tolist()
            self._held += token_ids
            self._speak(self._guard.feed(token_ids))
        return self._advance()

    def _speak(self, num: int) -> None:
        self._text += self._held[:num]
        del self._held[:num]

    def end(self, end: StreamEnd) -> Conditioning:
        self._speak(self._guard.end())
        result = self._advance()
        if not self._has_begun:
            return Conditioning(is_empty=True)
        result.steps.append(Rows(TEXT, np.array([self._config.tts_eos_token_id])))
        result.is_last = True
        return result

    def _advance(self) -> Conditioning:
        result = Conditioning()
        if not self._has_begun:
            if self._turns is None or not self._text or self._lacks_media(self._turns):
                return result
            result.prompt = self._make_prompt(self._turns, self._text.pop(0))
            self._has_begun = True
            self._media.clear()
        if self._text:
            result.steps.append(Rows(TEXT, np.array(self._text)))
            self._text = []
        return result

    def _lacks_media(self, turns: Turns) -> bool:
        return not all(position in self._media for position in turns.media_positions)

    def _make_prompt(self, turns: Turns, first: int) -> ConditionedPrompt:
        config = self._config
        pads = [config.tts_pad_token_id] * _NUM_PAD
        head = [*turns.reply[:_NUM_HEAD], *pads, config.tts_bos_token_id, first]
        codes = [
            config.codec_nothink_id,
            config.codec_think_bos_id,
            config.codec_think_eos_id,
            self._voice_id,
            config.codec_pad_id,
            config.codec_bos_id,
        ]
        num_silent = turns.num_user + len(head) - len(codes)
        positions = None
        if self._positions is not None:
            positions = turns.positions_heard(self._positions, len(head))
        return ConditionedPrompt(
            base=[Rows(NONE, np.empty(num_silent)), Rows(CODEC, np.array(codes))],
            conditions=[*self._user_rows(turns), Rows(TEXT, np.array(head))],
            token_ids=[config.codec_pad_id] * (turns.num_user + len(head)),  # never sampled
            positions=positions,
        )

    def _user_rows(self, turns: Turns) -> list[Rows]:
        return [
            Rows(MEDIA, np.stack([self._media[p] for p in run.positions]))
            if run.is_media
            else Rows(TEXT, run.token_ids)
            for run in turns.user_runs()
        ]
