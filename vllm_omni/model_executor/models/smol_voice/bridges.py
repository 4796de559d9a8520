"""How the stages feed each other: words heard go into the prompt, tokens written become clauses.

`insert_transcripts` runs in the API process, `SpokenClauses` in the voice's replica, which
loads neither torch nor vLLM: this module imports nothing heavier than `tokenizers`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vllm_omni.errors import BadRequestError
from vllm_omni.inputs.prompt import OmniPrompt
from vllm_omni.model_executor.models.smol_voice.clauses import ClauseCutter
from vllm_omni.model_executor.models.smol_voice.speakable import speakable
from vllm_omni.model_executor.models.smol_voice.stop_strings import StopStrings

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from vllm_omni.distributed.omni_connectors.base import Frame
    from vllm_omni.engine.bridge import StreamEnd
    from vllm_omni.engine.messages import StageOutput, StreamSource

AUDIO_PLACEHOLDER: Final = "<|audio|>"
"""Stands in a prompt where the words of one audio item go."""

NOTHING_HEARD: Final = "(inaudible)"
"""Stands for an audio item without words, so that the thinker can say so."""

_SPECIAL: Final = re.compile(r"<\|[^|<>]*\|>")


def insert_transcripts(
    prompt: OmniPrompt, upstream: Mapping[str, Sequence[StageOutput]]
) -> OmniPrompt:
    """Put the transcript of each audio item in the place of its placeholder.

    Raises:
        BadRequestError: the prompt has no text, or not one placeholder for each audio item.
    """
    (outputs,) = upstream.values()
    transcripts = [_words(output) for output in outputs]
    if prompt.text is None:
        raise BadRequestError("audio can only be put into a prompt of text", field="prompt")
    found = prompt.text.count(AUDIO_PLACEHOLDER)
    if found != len(transcripts):
        raise BadRequestError(
            f"the prompt has {found} placeholders {AUDIO_PLACEHOLDER} for "
            f"{len(transcripts)} audio items",
            field="messages",
        )
    before, *rest = prompt.text.split(AUDIO_PLACEHOLDER)
    text = before + "".join(words + after for words, after in zip(transcripts, rest, strict=True))
    return replace(prompt, text=text, token_ids=None, engine_input=None, audio=())


def _words(output: StageOutput) -> str:
    completions = output.text.outputs if output.text is not None else []
    text = completions[0].text if completions else ""
    # A recogniser's text must not open or close a turn of the conversation.
    return _SPECIAL.sub(" ", text).strip() or NOTHING_HEARD


@functools.lru_cache(maxsize=4)
def load_tokenizer(tokenizer_dir: Path) -> Tokenizer:
    """The fast tokenizer of a checkpoint folder; kept, since it takes a moment to read."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))


class TokenReader:
    """Token ids to text, as vLLM's own incremental detokenizer does it."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._restart()

    def _restart(self) -> None:
        from tokenizers.decoders import DecodeStream

        self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)

    def read(self, token_id: int) -> str:
        """The text that this token completes; empty inside a character of several tokens."""
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception as error:
            # Raised for byte sequences that are no text; the stream cannot be used afterwards.
            if not str(error).startswith("Invalid prefix encountered"):
                raise
            self._restart()
            return self._stream.step(self._tokenizer, token_id) or ""


class SpokenClauses:
    """A `StreamBridge`: frames of token ids in, pieces of text to be spoken out."""

    def __init__(self, source: StreamSource) -> None:
        context = source.context
        skip_special_tokens = bool(context.get("skip_special_tokens", True))
        self._reader = TokenReader(
            load_tokenizer(Path(context["tokenizer_dir"]).resolve()),
            skip_special_tokens=skip_special_tokens,
        )
        stop = context.get("stop") or []
        self._stop = StopStrings(
            [stop] if isinstance(stop, str) else stop,
            include=bool(context.get("include_stop_str_in_output", False)),
        )
        self._cutter = ClauseCutter()

    def feed(self, frame: Frame) -> list[object]:
        token_ids = memoryview(frame.payload).cast("B").cast("I")
        text = "".join(self._reader.read(token_id) for token_id in token_ids)
        return _said(self._cutter.feed(self._stop.feed(text)))

    def end(self, end: StreamEnd) -> list[object]:
        """What is left is spoken, whether the text is complete (`stop`) or cut (`length`)."""
        pieces = self._cutter.feed(self._stop.end())
        return _said(pieces + self._cutter.end())


def _said(pieces: Sequence[str]) -> list[object]:
    return [text for piece in pieces if (text := speakable(piece))]


def split_text(text: str) -> list[object]:
    """The pieces in which a whole text is spoken: the same as if it had come token by token."""
    cutter = ClauseCutter()
    return _said(cutter.feed(text) + cutter.end())
