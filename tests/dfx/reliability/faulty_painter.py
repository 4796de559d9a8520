"""The painter, with orders. A step is one denoise step; decoding comes after the last one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.dfx.reliability.commit import commit
from tests.dfx.reliability.orders import Fault, order_in
from vllm_omni.diffusion.models.flux.diffusion_pipeline import Flux
from vllm_omni.diffusion.models.interface import DenoiseState


class FaultyPainter(Flux):
    """See `StepPipeline`."""

    _is_broken = False

    def denoise_step(self, states: Sequence[Any]) -> None:
        self._check()
        if _obey(states):
            self._is_broken = True
            self._check()
        super().denoise_step(states)

    def _check(self) -> None:
        if self._is_broken:
            raise RuntimeError("broken by the test")

    def decode(self, states: Sequence[Any]) -> Sequence[NDArray[np.uint8]]:
        for state in states:
            order = order_in(state.request.seed)
            if order is None or order.fault is not Fault.DECODE:
                continue
            vae: Any = self.components.vae
            if order.value or not vae.use_tiling:
                raise MemoryError("ordered by the test")
        return super().decode(states)


def _obey(states: Sequence[DenoiseState]) -> bool:
    """Do what the orders of a batch say; whether the model is broken from now on.

    Several paces are one: they share the device.
    """
    pause_ms = 0
    for state in states:
        order = order_in(state.request.seed)
        if order is None or order.fault is Fault.DECODE:
            continue
        step = state.step_index
        if order.fault is Fault.PACE or (order.fault is Fault.HANG and step == 1):
            pause_ms = max(pause_ms, order.value)
        elif order.fault is Fault.CROWDED:
            if len(states) > order.value:
                raise MemoryError("ordered by the test")
        elif order.fault is not Fault.HANG and step >= order.value:
            if order.fault is Fault.BREAK:
                return True
            commit(order.fault)
    time.sleep(pause_ms / 1000)
    return False
