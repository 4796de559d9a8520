"""What transformers says and speaks with a tiny checkpoint, sampling off everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Qwen3OmniMoeForConditionalGeneration

USER, ASSISTANT, NEW_LINE = 872, 77091, 198
IM_START, IM_END = 151644, 151645


@dataclass(frozen=True)
class Spoken:
    """One reply. The thinker ended it with `end_token`, which is not part of `reply`."""

    prompt: list[int]
    reply: list[int]
    end_token: int
    codes: list[list[int]]
    """The reference drops the last frame of a talker that was cut by its limit."""


def chat(*words: int) -> list[int]:
    """A user's turn and the beginning of the reply."""
    turn = [IM_START, USER, NEW_LINE, *words, IM_END, NEW_LINE]
    return [*turn, IM_START, ASSISTANT, NEW_LINE]


class Reference:
    """The reference model; slow to load, so share it."""

    def __init__(self, model_dir: Path) -> None:
        transformers.logging.set_verbosity_error()
        torch.set_num_threads(1)
        self.model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(
            model_dir, dtype=torch.float32
        ).eval()

    def speak(
        self, prompt: list[int], num_tokens: int, num_frames: int, speaker: str = "Ethan"
    ) -> Spoken:
        """A reply of at most `num_tokens` tokens, ended by what would have been the next one."""
        ids = torch.tensor([prompt])
        written = self.model.thinker.generate(
            input_ids=ids, max_new_tokens=num_tokens + 1, do_sample=False, eos_token_id=None
        )
        end_token = int(written[0, -1])
        codes: list[Any] = []
        self.model.code2wav.chunked_decode = lambda given, **_: (
            codes.append(given) or torch.zeros(1, 1, 1)
        )
        sequences, _ = self.model.generate(
            input_ids=ids,
            speaker=speaker,
            return_audio=True,
            thinker_do_sample=False,
            thinker_max_new_tokens=num_tokens + 1,
            thinker_eos_token_id=end_token,
            talker_do_sample=False,
            talker_max_new_tokens=num_frames,
            talker_repetition_penalty=1.0,
        )
        reply = sequences[0, len(prompt) :].tolist()
        assert reply[-1] == end_token, "the reference ended with its end token"
        return Spoken(prompt, reply[:-1], end_token, codes[0][0].T.tolist())
