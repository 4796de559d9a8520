"""What a listener hears of streamed audio, on a clock that the test moves."""

from __future__ import annotations

import pytest

from vllm_omni.engine.metrics_protocol import NullMetrics
from vllm_omni.entrypoints.openai.media.playback import Playback
from vllm_omni.outputs.media import AudioChunk
from vllm_omni.outputs.request_output import OmniRequestOutput

RATE_HZ = 1000


class Listener(NullMetrics):
    """Sends pieces at times of its own, and remembers the silences."""

    def __init__(self) -> None:
        self.silences: list[tuple[str, float]] = []
        self.now_s = 100.0
        self._playback = Playback(self, lambda: self.now_s)

    def audio_late(self, stage: str, seconds: float) -> None:
        self.silences.append((stage, pytest.approx(seconds)))

    def hears(self, length_s: float, *, after_s: float, index: int = 0) -> None:
        self.now_s += after_s
        chunk = AudioChunk(b"\0\0" * round(length_s * RATE_HZ), RATE_HZ)
        self._playback.sending(
            OmniRequestOutput(request_id="r", stage="voice", index=index, audio=chunk)
        )


def test_a_piece_that_leaves_when_all_before_have_played_is_a_silence() -> None:
    listener = Listener()
    listener.hears(0.057, after_s=7.0)  # whatever it took, nothing was playing yet
    listener.hears(0.4, after_s=0.31)
    listener.hears(0.4, after_s=0.1)
    assert listener.silences == [("voice", 0.253)]

    listener.hears(0.4, after_s=1.0)  # it has 0.7 s to play
    assert listener.silences[1:] == [("voice", 0.3)]


def test_pieces_ahead_of_the_listener_last_until_the_next() -> None:
    listener = Listener()
    for _ in range(5):
        listener.hears(1.0, after_s=0.1)
    listener.hears(1.0, after_s=4.5)
    assert not listener.silences
    listener.hears(0.1, after_s=1.2)
    assert listener.silences == [("voice", 0.1)]


def test_a_piece_that_comes_as_the_last_ends_is_heard_without_a_gap() -> None:
    listener = Listener()
    listener.hears(0.5, after_s=0.0)
    listener.hears(0.5, after_s=0.5)
    assert not listener.silences


def test_every_choice_is_listened_to_by_itself() -> None:
    listener = Listener()
    listener.hears(0.2, after_s=0.0)
    listener.hears(3.0, after_s=0.1, index=1)
    listener.hears(0.2, after_s=0.2)
    listener.hears(0.2, after_s=1.0, index=1)
    assert listener.silences == [("voice", 0.1)]
