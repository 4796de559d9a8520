"""One forward whose failures stay with the requests that cause them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from vllm_omni.generation.model import OneShotModel, Work
from vllm_omni.outputs.media import AudioChunk

logger = logging.getLogger(__name__)

Result = AudioChunk | BaseException | None


def run_forward(model: OneShotModel, batch: Sequence[Work]) -> list[Result]:
    """Run a batch; when it fails as a whole, run its members one by one."""
    try:
        return _forward(model, batch)
    except Exception as error:  # noqa: BLE001 - the boundary of a batch
        if len(batch) == 1:
            return [error]
        logger.warning("a forward of %d failed, running one by one: %r", len(batch), error)
    results: list[Result] = []
    for work in batch:
        results += run_forward(model, [work])
    return results


def _forward(model: OneShotModel, batch: Sequence[Work]) -> list[Result]:
    results = list(model.forward(batch))
    if len(results) != len(batch):
        raise RuntimeError(f"the model gave {len(results)} results for {len(batch)} inputs")
    return [_checked(result) for result in results]


def _checked(result: Result) -> Result:
    if isinstance(result, AudioChunk) and (len(result.pcm) % 2 or result.sample_rate_hz <= 0):
        return RuntimeError("the model gave samples that are not 16 bit audio")
    return result
