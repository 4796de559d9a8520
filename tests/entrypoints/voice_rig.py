"""A voice pipeline whose stages a test plays, behind the real AsyncOmni."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams

from tests.fakes import (
    FakePreparer,
    FakeStageClient,
    fake_omni,
    says,
    speaks,
    voice_pipeline,
)
from vllm_omni.outputs.request_output import OmniRequestOutput

DELTA = SamplingParams(output_kind=RequestOutputKind.DELTA)


class Voice:
    """A voice pipeline whose stages a test plays."""

    def __init__(self, **kwargs: Any) -> None:
        self.asr = FakeStageClient(says("what is this"))
        self.thinker = FakeStageClient(says("It ", "is ", "a test."))
        self.voice = FakeStageClient(speaks(2))
        self.preparers = {name: FakePreparer() for name in ("asr", "thinker", "voice")}
        self.omni = fake_omni(
            voice_pipeline(),
            [[self.asr], [self.thinker], [self.voice]],
            preparers=self.preparers,
            **kwargs,
        )

    @property
    def is_clean(self) -> bool:
        """Nothing is left of any request, on either side."""
        orchestrator = self.omni.engine._orchestrator
        assert orchestrator is not None
        return (
            not orchestrator.request_states
            and not len(self.omni._router)
            and self.omni._admission.in_flight == 0
            and not self.omni._internal_ids
        )


@asynccontextmanager
async def voice(**kwargs: Any) -> AsyncIterator[Voice]:
    async with asyncio.timeout(30):
        stages = Voice(**kwargs)
        async with stages.omni:
            yield stages


async def collect(stream: Any) -> list[OmniRequestOutput]:
    async with aclosing(stream) as outputs:
        return [output async for output in outputs]


def text_of(outputs: Sequence[OmniRequestOutput], index: int = 0) -> str:
    return "".join(output.text for output in outputs if output.index == index)


def samples_of(outputs: Sequence[OmniRequestOutput], index: int = 0) -> int:
    return sum(o.audio.num_samples for o in outputs if o.audio is not None and o.index == index)
