"""What a listener hears who plays an answer's audio while it is sent."""

from __future__ import annotations

import time
from collections.abc import Callable

from vllm_omni.engine.metrics_protocol import EngineMetrics
from vllm_omni.outputs.request_output import OmniRequestOutput


class Playback:
    """Tells the metrics of every silence: the next samples leave when all before have played.

    A choice starts to play with its first samples. Who reads slowly holds up what is sent, and
    its silences count too.
    """

    def __init__(self, metrics: EngineMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._played_at: dict[int, float] = {}
        """By choice: when the last sample sent so far will have played."""

    def sending(self, output: OmniRequestOutput) -> None:
        """These samples leave now."""
        assert output.audio is not None
        now_s = self._clock()
        played_at = self._played_at.get(output.index, now_s)
        if now_s > played_at:
            assert output.stage is not None, "what is streamed names its stage"
            self._metrics.audio_late(output.stage, now_s - played_at)
        self._played_at[output.index] = max(played_at, now_s) + output.audio.duration_s
