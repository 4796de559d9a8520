"""From streamed outputs of one request to its whole result."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm_omni.outputs.media import AudioChunk, Frames
from vllm_omni.outputs.request_output import OmniRequestOutput

if TYPE_CHECKING:
    from PIL.Image import Image
    from vllm.outputs import RequestOutput


class WholeResult:
    """Collects what `AsyncOmni.generate` yields for one request."""

    def __init__(self, request_id: str, *, delta: bool = False) -> None:
        """`delta`: texts arrive as deltas; otherwise the last one of a choice is all of it."""
        self.request_id = request_id
        self._delta = delta
        self._texts: dict[int, RequestOutput] = {}
        self._audio: dict[int, list[AudioChunk]] = {}
        self._images: dict[int, list[Image]] = {}
        self._videos: dict[int, Frames] = {}
        self._last: OmniRequestOutput | None = None

    def add(self, output: OmniRequestOutput) -> None:
        self._last = output
        text = output.request_output
        if text is not None:
            older = self._texts.get(output.index)
            if older is None:
                self._texts[output.index] = text
            else:
                older.add(text, aggregate=self._delta)
        if output.audio is not None:
            self._audio.setdefault(output.index, []).append(output.audio)
        if output.images:
            self._images.setdefault(output.index, []).extend(output.images)
        if output.video is not None:
            self._videos[output.index] = output.video

    def result(self) -> OmniRequestOutput:
        """Everything so far as one output; `finished` as the last one said."""
        audios, videos = self._audios(), self._all_videos()
        return OmniRequestOutput(
            request_id=self.request_id,
            finished=self._last is not None and self._last.finished,
            request_output=self._text(),
            audio=audios[0] if audios else None,
            audios=audios if len(audios) > 1 else (),
            images=[image for index in sorted(self._images) for image in self._images[index]],
            video=videos[0] if videos else None,
            videos=videos if len(videos) > 1 else (),
            timings=self._last.timings if self._last is not None else {},
        )

    def _text(self) -> RequestOutput | None:
        """vLLM's shape: one request output with all choices in order."""
        if not self._texts:
            return None
        texts = [self._texts[index] for index in sorted(self._texts)]
        whole = copy.copy(texts[0])
        whole.outputs = [completion for text in texts for completion in text.outputs]
        whole.finished = all(text.finished for text in texts)
        return whole

    def _audios(self) -> tuple[AudioChunk | None, ...]:
        if not self._audio:
            return ()
        return tuple(
            join_audio(self._audio.get(index, ())) for index in range(max(self._audio) + 1)
        )

    def _all_videos(self) -> tuple[Frames | None, ...]:
        if not self._videos:
            return ()
        return tuple(self._videos.get(index) for index in range(max(self._videos) + 1))


def join_audio(chunks: Iterable[AudioChunk]) -> AudioChunk | None:
    """Chunks of one stream as one; None when there are none."""
    pieces = list(chunks)
    if not pieces:
        return None
    rates = {chunk.sample_rate_hz for chunk in pieces}
    assert len(rates) == 1, "one stream has one sample rate"
    return AudioChunk(b"".join(chunk.pcm for chunk in pieces), rates.pop())
