"""Grammars in a stage's core: the slow one ends, and each request gets the backend it needs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, cast

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.engine import core as core_module
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from tests.tiny_models import make_tiny_llama
from vllm_omni.core.grammars import MAX_SLOW_S, TOO_SLOW, StageGrammars, WatchedGrammar
from vllm_omni.core.step_faults import decode_reason
from vllm_omni.vllm_compat import grammar_manager


class SlowGrammar:
    """Takes what it is told by the clock that it moves."""

    def __init__(self, cost_s: float) -> None:
        self.cost_s = cost_s
        self.now_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self.now_s += self.cost_s
        return True

    def fill_bitmask(self, bitmask: object, batch_index: int) -> None:
        self.now_s += self.cost_s


def watched(cost_s: float) -> WatchedGrammar:
    slow = SlowGrammar(cost_s)
    return WatchedGrammar(cast("StructuredOutputGrammar", slow), slow.clock)


def test_a_grammar_that_takes_long_again_and_again_is_too_slow() -> None:
    grammar = watched(0.2)
    looks = 0
    while not grammar.is_too_slow:
        grammar.fill_bitmask(cast("Any", None), 0)
        grammar.accept_tokens("r", [1])
        looks += 2
    assert looks * 0.2 == pytest.approx(MAX_SLOW_S, abs=0.5)


def test_a_usual_grammar_never_is() -> None:
    grammar = watched(0.002)
    for _ in range(10_000):
        grammar.accept_tokens("r", [1])
    assert not grammar.is_too_slow


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    model_dir = make_tiny_llama(tmp_path_factory.mktemp("tiny"))
    args = AsyncEngineArgs(model=str(model_dir), dtype="float32", max_model_len=256)
    return args.create_engine_config()


@pytest.fixture
def grammars(config: VllmConfig) -> Iterator[StageGrammars]:
    grammars = StageGrammars(config)
    yield grammars
    grammars.clear_backend()


def ask(config: VllmConfig, **wanted: Any) -> Request:
    """A request as it comes to the core: validated, its backend chosen."""
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**wanted))
    tokenizer = cached_tokenizer_from_config(config.model_config)
    params._validate_structured_outputs(
        config.model_config, config.structured_outputs_config, tokenizer
    )
    return Request("r", [1], params, None)


def compiled(grammars: StageGrammars, request: Request) -> object:
    """What came of a request's grammar: it, or what its compiling raised."""
    grammars.grammar_init(request)
    wanted = request.structured_output_request
    future = wanted._grammar
    assert isinstance(future, Future)
    future.exception()
    return wanted.grammar


def test_the_first_request_does_not_choose_the_backend_of_all(
    config: VllmConfig, grammars: StageGrammars
) -> None:
    even = {"type": "integer", "multipleOf": 2}
    first = ask(config, json=even)
    second = ask(config, choice=["yes", "no"])
    third = ask(config, json=even)
    backends = [one.sampling_params.structured_outputs._backend for one in (first, second)]
    assert backends == ["guidance", "xgrammar"], "else this test shows nothing"

    for request in (first, second, third):
        assert isinstance(compiled(grammars, request), WatchedGrammar)
    used = {name: type(backend).__name__ for name, backend in grammars._backends.items()}
    assert used == {"guidance": "GuidanceBackend", "xgrammar": "XgrammarBackend"}


def test_a_request_whose_grammar_is_too_slow_ends_and_says_why(
    config: VllmConfig, grammars: StageGrammars
) -> None:
    request = ask(config, regex="[a-z]+")
    slow = watched(MAX_SLOW_S / 2)
    request.structured_output_request.grammar = slow

    assert grammars.accept_tokens(request, [1])
    assert grammars.accept_tokens(request, [1])
    assert not grammars.accept_tokens(request, [1])
    assert request.stop_reason == TOO_SLOW
    assert decode_reason(TOO_SLOW) == (
        "invalid_request",
        "the grammar of the structured output takes too long",
    )


def test_a_request_that_has_ended_keeps_its_end(
    config: VllmConfig, grammars: StageGrammars
) -> None:
    request = ask(config, regex="[a-z]+")
    request.structured_output_request.grammar = watched(MAX_SLOW_S * 2)
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED

    assert grammars.accept_tokens(request, [1])
    assert request.stop_reason is None


def test_the_core_builds_our_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "StructuredOutputManager", StructuredOutputManager)
    grammar_manager.install(StageGrammars)

    assert core_module.StructuredOutputManager is StageGrammars
    source = inspect.getsource(EngineCore.__init__)
    assert "self.structured_output_manager = StructuredOutputManager(vllm_config)" in source
