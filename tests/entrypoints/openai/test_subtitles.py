"""Transcripts as subtitles."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.speech_to_text.base.serving import SpeechToTextBaseServing

from vllm_omni.entrypoints.openai.transcriptions.serving import OmniServingTranscription
from vllm_omni.entrypoints.openai.transcriptions.subtitles import to_srt, to_vtt


def test_subtitles() -> None:
    segments = [
        SimpleNamespace(start=0.0, end=1.25, text=" Hello."),
        SimpleNamespace(start=3599.9996, end=3661.5, text="Bye."),
    ]

    assert to_srt(segments) == (
        "1\n00:00:00,000 --> 00:00:01,250\nHello.\n\n2\n01:00:00,000 --> 01:01:01,500\nBye.\n\n"
    )
    assert to_vtt(segments).startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.250\nHello.\n\n")


async def test_no_segment_goes_beyond_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = [SimpleNamespace(start=0.0, end=2.0), SimpleNamespace(start=2.5, end=10.0)]

    async def preprocess(*args: Any) -> Any:
        return [], 3.0, [0.0]

    def get_segments(*args: Any) -> Any:
        return segments

    monkeypatch.setattr(SpeechToTextBaseServing, "_preprocess_speech_to_text", preprocess)
    monkeypatch.setattr(SpeechToTextBaseServing, "_get_verbose_segments", get_segments)
    bound = OmniServingTranscription.__new__(OmniServingTranscription)

    await bound._preprocess_speech_to_text()

    found = [(item.start, item.end) for item in bound._get_verbose_segments()]
    assert found == [(0.0, 2.0), (2.5, 3.0)]
