"""The voice, with orders. A step is one forward; pieces of a text are its steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from tests.dfx.reliability.commit import commit
from tests.dfx.reliability.orders import Fault, Order, order_in
from vllm_omni.generation.model import Work
from vllm_omni.inputs.speech import SpeechParams
from vllm_omni.model_executor.models.smol_voice.voice import PiperVoice
from vllm_omni.outputs.media import AudioChunk


@dataclass(slots=True)
class _State:
    speaking: object
    order: Order | None
    num_pieces: int = 0


class FaultyVoice(PiperVoice):
    """See `OneShotModel`."""

    _is_broken = False

    def self_test(self) -> None:
        self._check()
        super().self_test()

    def _check(self) -> None:
        if self._is_broken:
            raise RuntimeError("broken by the test")

    def start(self, prompt: object, params: object) -> tuple[object, list[object]]:
        speaking, pieces = super().start(prompt, params)
        seed = params.seed if isinstance(params, SpeechParams) else None
        return _State(speaking, order_in(seed)), pieces

    def forward(self, batch: Sequence[Work]) -> Sequence[AudioChunk | BaseException | None]:
        states = [work.state for work in batch if isinstance(work.state, _State)]
        self._check()
        if _obey(states):
            self._is_broken = True
            self._check()
        works = [
            Work(state.speaking, work.item, is_last=work.is_last)
            for state, work in zip(states, batch, strict=True)
        ]
        results = super().forward(works)
        for state in states:
            state.num_pieces += 1
        return results

    def finish(self, state: object) -> None:
        assert isinstance(state, _State)
        super().finish(state.speaking)


def _obey(states: Sequence[_State]) -> bool:
    """Do what the orders of a batch say; whether the model is broken from now on.

    Several paces are one: they share the device.
    """
    pause_ms = 0
    for state in states:
        order = state.order
        if order is None:
            continue
        if order.fault is Fault.PACE or (order.fault is Fault.HANG and state.num_pieces == 1):
            pause_ms = max(pause_ms, order.value)
        elif state.num_pieces == order.value:
            if order.fault is Fault.BREAK:
                return True
            commit(order.fault)
    time.sleep(pause_ms / 1000)
    return False
