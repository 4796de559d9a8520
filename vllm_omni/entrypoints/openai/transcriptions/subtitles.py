"""Segments of a transcript as SubRip or WebVTT."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Segment(Protocol):
    """A piece of the transcript with its time, in seconds."""

    start: float
    end: float
    text: str


def to_srt(segments: Sequence[Segment]) -> str:
    return "".join(
        f"{i}\n{_stamp(item.start, ',')} --> {_stamp(item.end, ',')}\n{item.text.strip()}\n\n"
        for i, item in enumerate(segments, 1)
    )


def to_vtt(segments: Sequence[Segment]) -> str:
    return "WEBVTT\n\n" + "".join(
        f"{_stamp(item.start, '.')} --> {_stamp(item.end, '.')}\n{item.text.strip()}\n\n"
        for item in segments
    )


def _stamp(time_s: float, point: str) -> str:
    total_ms = round(time_s * 1000)
    minutes, ms = divmod(total_ms, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{ms // 1000:02}{point}{ms % 1000:03}"
