"""A one-shot engine on the tone model, and what each request has got so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tests.generation.tone import ToneModel
from vllm_omni.distributed.omni_connectors.base import Frame
from vllm_omni.engine.messages import StageOutput, StreamSource
from vllm_omni.generation.engine import OneShotEngine
from vllm_omni.generation.model import ModelContext, Work
from vllm_omni.inputs.prompt import OmniPrompt
from vllm_omni.inputs.speech import SpeechParams
from vllm_omni.outputs.media import AudioChunk

BRIDGE = "tests.generation.tone:WordBridge"


class RecordingModel(ToneModel):
    """Remembers which words shared a forward."""

    def __init__(self) -> None:
        super().__init__(ModelContext(model_dir=Path("/"), device="cpu", num_threads=1))
        self.batches: list[list[str]] = []
        self.last: list[bool] = []
        self.num_self_tests = 0

    def forward(self, batch: Sequence[Work]) -> Sequence[AudioChunk | BaseException | None]:
        self.batches.append([str(work.item) for work in batch])
        self.last += [work.is_last for work in batch]
        return super().forward(batch)

    def self_test(self) -> None:
        self.num_self_tests += 1


class FakeReceiver:
    """A receiver whose frames the test writes."""

    address = "ipc:///nowhere"

    def __init__(self) -> None:
        self.handlers: dict[str, Callable[[Frame], None]] = {}
        self.arrivals: dict[str, Callable[[], None] | None] = {}
        self.cancelled: list[str] = []
        self.num_released = 0

    def subscribe(
        self,
        stream: str,
        on_frame: Callable[[Frame], None],
        on_arrival: Callable[[], None] | None = None,
    ) -> None:
        self.handlers[stream], self.arrivals[stream] = on_frame, on_arrival

    def cancel(self, stream: str) -> None:
        self.cancelled.append(stream)

    def close(self) -> None:
        pass

    def send(self, stream: str, text: str) -> None:
        payload = memoryview(text.encode())
        self._hand_over(Frame(stream, 0, payload=payload, release=self._release))

    def end(self, stream: str, reason: str = "stop", error: str = "") -> None:
        self._hand_over(Frame(stream, 0, end=reason, error=error))

    def _hand_over(self, frame: Frame) -> None:
        self.handlers[frame.stream](frame)
        if (on_arrival := self.arrivals[frame.stream]) is not None:
            on_arrival()

    def _release(self) -> None:
        self.num_released += 1


class Bench:
    """An engine with its surroundings, and what each request has got so far."""

    def __init__(self, max_batch_size: int = 4) -> None:
        ToneModel.live_states = 0
        RecordingModel.live_states = 0
        self.model = RecordingModel()
        self.receiver = FakeReceiver()
        self.now = 0.0
        self.num_wakes = 0
        self.pcm: dict[str, bytes] = {}
        self.ended: dict[str, StageOutput] = {}
        self.engine = OneShotEngine(
            "voice",
            self.model,
            max_batch_size,
            receiver=self.receiver,
            clock=lambda: self.now,
            wake=self._wake,
        )

    def _wake(self) -> None:
        self.num_wakes += 1

    def say(self, request_id: str, text: str, **more: float) -> None:
        self.engine.add(request_id, OmniPrompt(text=text), SpeechParams(), **more)

    def listen(self, request_id: str, stream: str, **more: float) -> None:
        source = StreamSource(stream, "thinker", BRIDGE)
        self.engine.add(request_id, None, SpeechParams(), [source], **more)

    def step(self) -> None:
        for output in self.engine.step():
            assert output.request_id not in self.ended, "an output after the last one"
            if output.audio is not None:
                pcm = self.pcm.get(output.request_id, b"")
                self.pcm[output.request_id] = pcm + output.audio.pcm
            if output.finished:
                self.ended[output.request_id] = output

    def run(self) -> None:
        while self.engine.has_work:
            self.step()

    def failure(self, request_id: str) -> tuple[str, str]:
        failure = self.ended[request_id].failure
        assert failure is not None
        return failure.code, failure.message
