"""Transcripts as subtitles."""

from __future__ import annotations

from types import SimpleNamespace

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
