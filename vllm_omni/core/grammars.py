"""Structured output in a stage's core: no grammar holds up the requests of others.

Grammars are followed between two steps, by code that nothing can interrupt. What one of them takes
is measured, and a request whose grammar takes too long ends. Backends are chosen by each request:
vLLM keeps the one that the first request needed for all that come.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputBackend, StructuredOutputGrammar

from vllm_omni.errors import BadRequestError

if TYPE_CHECKING:
    import torch
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_SLOW_S: Final = 0.05
"""CPU seconds of one look at a grammar from which on they count: usual ones take microseconds."""
MAX_SLOW_S: Final = 1.0
"""CPU seconds of slow looks that a request may cost."""
TOO_SLOW: Final = f"{BadRequestError.code} the grammar of the structured output takes too long"
"""`stop_reason` of a request that is ended for it, as `decode_reason` reads it."""


class WatchedGrammar(StructuredOutputGrammar):  # type: ignore[misc]
    """A grammar that knows what it has cost. CPU time: a busy machine is not its fault."""

    def __init__(
        self, grammar: StructuredOutputGrammar, clock: Callable[[], float] = time.thread_time
    ) -> None:
        self._grammar = grammar
        self._clock = clock
        self._slow_s = 0.0

    @property
    def is_too_slow(self) -> bool:
        return self._slow_s > MAX_SLOW_S

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        with self._timed():
            return bool(self._grammar.accept_tokens(request_id, tokens))

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        with self._timed():
            valid: list[int] = self._grammar.validate_tokens(tokens)
            return valid

    def rollback(self, num_tokens: int) -> None:
        self._grammar.rollback(num_tokens)

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        with self._timed():
            self._grammar.fill_bitmask(bitmask, batch_index)

    def is_terminated(self) -> bool:
        return bool(self._grammar.is_terminated())

    def reset(self) -> None:
        self._grammar.reset()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began_s = self._clock()
        yield
        taken_s = self._clock() - began_s
        if taken_s >= _SLOW_S:
            self._slow_s += taken_s


class StageGrammars(StructuredOutputManager):  # type: ignore[misc]
    """vLLM's manager; `vllm_compat/grammar_manager.py` has the core build it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._backends: dict[str | None, StructuredOutputBackend] = {}
        self._choosing = threading.Lock()
        """Held while a request's backend is looked for; its compiling waits for that."""

    def grammar_init(self, request: Request) -> None:
        if request.structured_output_request is None:
            return
        name = _backend_of(request)
        with self._choosing:
            self.backend = self._backends.get(name)
            super().grammar_init(request)
            self._backends[name] = self.backend

    def _create_grammar(self, request: Request) -> StructuredOutputGrammar:
        with self._choosing:
            backend = self._backends[_backend_of(request)]
        kind, text = request.structured_output_request.structured_output_key
        stop_token_ids = request.sampling_params.all_stop_token_ids
        try:
            grammar = backend.compile_grammar(kind, text, stop_token_ids=stop_token_ids)
        except Exception as error:
            # Whatever a backend raises: it stays in the future, and this request fails alone.
            logger.warning("no grammar for request %s: %s", request.request_id, error)
            raise
        return WatchedGrammar(grammar)

    def accept_tokens(self, request: Request, new_token_ids: list[int]) -> bool:
        accepted = bool(super().accept_tokens(request, new_token_ids))
        wanted = request.structured_output_request
        if wanted is None or request.is_finished():
            return accepted
        grammar = wanted.grammar
        if isinstance(grammar, WatchedGrammar) and grammar.is_too_slow:
            request.stop_reason = TOO_SLOW
            return False
        return accepted

    def clear_backend(self) -> None:
        self.backend = None  # one of ours
        super().clear_backend()
        for backend in self._backends.values():
            backend.destroy()
        self._backends.clear()


def _backend_of(request: Request) -> str | None:
    name: str | None = request.sampling_params.structured_outputs._backend
    return name
