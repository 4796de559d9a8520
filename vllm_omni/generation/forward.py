"""One forward whose failures stay with the requests that cause them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from vllm_omni.generation.memory_errors import free_memory, halves, is_out_of_memory
from vllm_omni.generation.model import OneShotModel, Work
from vllm_omni.outputs.media import AudioChunk

logger = logging.getLogger(__name__)

Result = AudioChunk | BaseException | None


def run_forward(model: OneShotModel, batch: Sequence[Work]) -> list[Result]:
    """Run a batch; one result for each member, its own error included.

    A batch that fails as a whole is run one by one. What found no memory is run again, half as
    many at a time and in the end each alone, after memory was given back; what finds none even
    then has its error as result.
    """
    results = _run_apart(model, batch)
    for size in halves(len(batch)):
        starved = [i for i, result in enumerate(results) if _is_starved(result)]
        if not starved:
            break
        for i in starved:
            results[i] = None  # its traceback holds on to what the forward had allocated
        logger.warning(
            "no memory for %d of %d, trying %d at a time", len(starved), len(batch), size
        )
        free_memory()
        for first in range(0, len(starved), size):
            part = starved[first : first + size]
            again = _run_apart(model, [batch[i] for i in part])
            for i, result in zip(part, again, strict=True):
                results[i] = result
    return results


def _run_apart(model: OneShotModel, batch: Sequence[Work]) -> list[Result]:
    """Run a batch; one that raises is run one by one, unless it is memory that lacks."""
    try:
        return _forward(model, batch)
    except Exception as error:  # noqa: BLE001 - the boundary of a batch
        if len(batch) == 1 or is_out_of_memory(error):
            return [_without_frames(error)] * len(batch)
        logger.warning("a forward of %d failed, running one by one: %r", len(batch), error)
    results: list[Result] = []
    for work in batch:
        results += _run_apart(model, [work])
    return results


def _without_frames(error: Exception) -> Exception:
    return error.with_traceback(None) if is_out_of_memory(error) else error


def _is_starved(result: Result) -> bool:
    return isinstance(result, BaseException) and is_out_of_memory(result)


def _forward(model: OneShotModel, batch: Sequence[Work]) -> list[Result]:
    results = list(model.forward(batch))
    if len(results) != len(batch):
        raise RuntimeError(f"the model gave {len(results)} results for {len(batch)} inputs")
    return [_checked(result) for result in results]


def _checked(result: Result) -> Result:
    if isinstance(result, AudioChunk) and (len(result.pcm) % 2 or result.sample_rate_hz <= 0):
        return RuntimeError("the model gave samples that are not 16 bit audio")
    return result
