"""Requests whose work one stage does, long enough for something to happen to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from benchmarks.load_client import SENTENCE, LoadClient, Outcome, recording
from tests.dfx.reliability.harness import Rig, running, under_way
from tests.dfx.reliability.orders import Fault, seed_for

STAGES: Final = ("asr", "thinker", "voice")
"""Of the speaking server."""
PICTURES: Final = "diffusion"
"""The stage of the server that paints."""
PACE_MS: Final = 20
_RECORDING: Final = recording()


def ask(
    client: LoadClient,
    stage: str,
    fault: Fault = Fault.PACE,
    value: int = PACE_MS,
    *,
    size: int = 100,
    previews: int = 0,
    into: Outcome | None = None,
) -> Coroutine[Any, Any, Outcome]:
    """A request of `size` steps; a picture may show this often what it is like so far."""
    seed = seed_for(fault, value)
    match stage:
        case "asr":
            return client.transcribe(_RECORDING, max_tokens=size, seed=seed, into=into)
        case "thinker":
            return client.chat("Say something.", max_tokens=size, seed=seed, into=into)
        case "diffusion":
            return client.picture(
                "A small clock.", steps=size, seed=seed, previews=previews, into=into
            )
        case _:
            return client.speech(SENTENCE * size, seed=seed, into=into)


@asynccontextmanager
async def streaming(
    rig: Rig,
    stages: Sequence[str],
    *,
    size: int = 100,
    pace_ms: int = PACE_MS,
    previews: int = 0,
) -> AsyncIterator[list[tuple[Outcome, asyncio.Task[Outcome]]]]:
    """One paced request for each entry of `stages`, every one of them under way."""
    outcomes = [Outcome(stage) for stage in stages]
    requests = [
        ask(rig.client, one.kind, value=pace_ms, size=size, previews=previews, into=one)
        for one in outcomes
    ]
    async with running(*requests) as tasks:
        await under_way(rig.client, outcomes)
        yield list(zip(outcomes, tasks, strict=True))


async def finish(streams: Sequence[tuple[Outcome, asyncio.Task[Outcome]]]) -> list[Outcome]:
    """Wait for the ends of all."""
    return list(await asyncio.gather(*(task for _, task in streams)))
