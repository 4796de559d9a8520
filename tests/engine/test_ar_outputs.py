"""Engine outputs to stage outputs, without a process, on a tiny tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.tokenizers import TokenizerLike, get_tokenizer
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason

from tests.tiny_models import make_tiny_llama
from vllm_omni.core.step_faults import encode_reason
from vllm_omni.engine import ar_outputs
from vllm_omni.engine.ar_outputs import ArOutputs, Processed
from vllm_omni.engine.ar_prompts import PreparedPrompt
from vllm_omni.engine.messages import StageFailure, StreamTarget

TARGET = StreamTarget("ipc:///voice", "s")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TokenizerLike:
    folder: Path = make_tiny_llama(tmp_path_factory.mktemp("llama"))
    return get_tokenizer(str(folder))


@pytest.fixture
def outputs(tokenizer: TokenizerLike) -> ArOutputs:
    return ArOutputs("thinker/0", tokenizer)


def prepared(text: str | None = None, **params: object) -> PreparedPrompt:
    wanted = {"output_kind": RequestOutputKind.DELTA, "max_tokens": 50, **params}
    request = EngineCoreRequest(
        request_id="prepared",
        prompt_token_ids=[3, 4],
        mm_features=None,
        sampling_params=SamplingParams(**wanted),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    return PreparedPrompt([request], text)


def step(outputs: ArOutputs, *produced: EngineCoreOutput) -> Processed:
    return outputs.process(EngineCoreOutputs(outputs=list(produced), timestamp=1.0))


def words(tokenizer: TokenizerLike, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def test_text_is_detokenised_and_the_prompt_goes_with_it(
    outputs: ArOutputs, tokenizer: TokenizerLike
) -> None:
    _, (sent,) = outputs.add("r", [prepared("the prompt")], ())
    result = step(outputs, EngineCoreOutput(sent.request_id, words(tokenizer, "Hello there")))

    (output,) = result.outputs
    assert output.text.outputs[0].text == "Hello there"
    assert output.text.prompt == "the prompt"
    assert (output.request_id, output.finished) == ("r", False)
    assert "r" in outputs


def test_a_text_that_leaves_whole_says_when_its_first_token_was_made(
    outputs: ArOutputs, tokenizer: TokenizerLike, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [5.0]
    monkeypatch.setattr(ar_outputs.time, "monotonic", lambda: now_s[0])
    whole = prepared(output_kind=RequestOutputKind.FINAL_ONLY)
    _, (sent,) = outputs.add("r", [whole], ())
    assert step(outputs, EngineCoreOutput(sent.request_id, [])).outputs == []
    now_s[0] = 6.0
    assert step(outputs, EngineCoreOutput(sent.request_id, words(tokenizer, "one"))).outputs == []
    now_s[0] = 9.0
    ended = EngineCoreOutput(
        sent.request_id, words(tokenizer, " two"), finish_reason=FinishReason.LENGTH
    )
    (output,) = step(outputs, ended).outputs

    assert output.finished
    assert output.first_made_s == 6.0


def test_a_finished_request_is_forgotten(outputs: ArOutputs) -> None:
    _, (sent,) = outputs.add("r", [prepared()], ())
    done = EngineCoreOutput(sent.request_id, [40], finish_reason=FinishReason.LENGTH)
    result = step(outputs, done)

    assert result.outputs[0].finished
    assert result.abort == []
    assert "r" not in outputs
    assert step(outputs, done).outputs == []


@pytest.mark.parametrize(("targets", "told"), [((), "abort"), ((TARGET,), "stop")])
def test_a_stop_string_is_told_to_the_core(
    outputs: ArOutputs, tokenizer: TokenizerLike, targets: tuple[StreamTarget, ...], told: str
) -> None:
    _, (sent,) = outputs.add("r", [prepared(stop=["you"])], targets)
    tokens = words(tokenizer, "how are you today")
    result = step(outputs, EngineCoreOutput(sent.request_id, tokens))

    assert result.outputs[0].text.outputs[0].text == "how are "
    assert result.outputs[0].finished
    assert {"abort": result.abort, "stop": result.stop}[told] == [sent.request_id]
    assert len(result.abort) + len(result.stop) == 1


def test_targets_travel_as_plain_data_and_leave_the_caller_s_params_alone(
    outputs: ArOutputs,
) -> None:
    part = prepared()
    _, (sent,) = outputs.add("r", [part], (TARGET,))

    assert sent.sampling_params.extra_args == {"omni_targets": [["ipc:///voice", "s", False]]}
    assert part.requests[0].sampling_params.extra_args is None
    assert part.requests[0].request_id == "prepared"


def test_choices_become_one_output_each_and_all_are_aborted_together(outputs: ArOutputs) -> None:
    _, sent = outputs.add("r", [prepared(n=3, temperature=1.0)], ())
    step(outputs, EngineCoreOutput(sent[1].request_id, [40], finish_reason=FinishReason.LENGTH))

    assert len({request.request_id for request in sent}) == 3
    assert set(outputs.drop("r")) == {sent[0].request_id, sent[2].request_id}
    assert outputs.drop("r") == []


def test_an_error_of_the_core_fails_the_request_and_stops_its_other_parts(
    outputs: ArOutputs,
) -> None:
    _, sent = outputs.add("r", [prepared(), prepared()], ())
    broken = EngineCoreOutput(sent[0].request_id, [], finish_reason=FinishReason.ERROR)
    result = step(outputs, broken)

    (output,) = result.outputs
    assert output.finished
    assert output.failure is not None
    assert (output.failure.code, output.text) == ("request_failed", None)
    assert sent[1].request_id in result.abort


def test_an_error_that_the_core_has_told_reaches_the_client_in_its_words(
    outputs: ArOutputs,
) -> None:
    _, (sent,) = outputs.add("r", [prepared()], ())
    reason = encode_reason(MemoryError("no more"), "thinker")
    broken = EngineCoreOutput(
        sent.request_id, [], finish_reason=FinishReason.ERROR, stop_reason=reason
    )

    assert step(outputs, broken).outputs[0].failure == StageFailure(
        "out_of_memory", "stage thinker has no memory for this request: no more"
    )


def test_a_grammar_that_the_core_cannot_compile_is_the_client_s_mistake(
    outputs: ArOutputs,
) -> None:
    constrained = prepared(structured_outputs=StructuredOutputsParams(regex="a{1,9}{2}"))
    _, (sent,) = outputs.add("r", [constrained], ())
    broken = EngineCoreOutput(sent.request_id, [], finish_reason=FinishReason.ERROR)

    failure = step(outputs, broken).outputs[0].failure
    assert (failure.code, failure.field) == ("invalid_request", "structured_outputs")


def test_an_error_of_the_core_behind_the_first_constrained_token_is_its_own(
    outputs: ArOutputs,
) -> None:
    constrained = prepared(structured_outputs=StructuredOutputsParams(regex="a+"))
    _, (sent,) = outputs.add("r", [constrained], ())
    step(outputs, EngineCoreOutput(sent.request_id, [40]))
    broken = EngineCoreOutput(sent.request_id, [41], finish_reason=FinishReason.ERROR)

    assert step(outputs, broken).outputs[0].failure.code == "request_failed"


def test_an_abort_by_the_core_itself_is_a_failure_that_may_be_tried_again(
    outputs: ArOutputs,
) -> None:
    _, (sent,) = outputs.add("r", [prepared()], ())
    ended = EngineCoreOutput(sent.request_id, [], finish_reason=FinishReason.ABORT)

    assert step(outputs, ended).outputs[0].failure.code == "stage_unavailable"


def test_an_output_that_cannot_be_read_fails_its_request_alone(
    outputs: ArOutputs, tokenizer: TokenizerLike
) -> None:
    _, (bad,) = outputs.add("bad", [prepared()], ())
    _, (good,) = outputs.add("good", [prepared()], ())
    result = step(
        outputs,
        EngineCoreOutput(bad.request_id, [40], new_logprobs="broken"),
        EngineCoreOutput(good.request_id, words(tokenizer, "fine")),
    )

    failed, fine = result.outputs
    assert (failed.request_id, failed.failure.code) == ("bad", "request_failed")
    assert fine.text.outputs[0].text == "fine"
    assert result.abort == [bad.request_id]
    assert "bad" not in outputs
    assert "good" in outputs


def test_nothing_is_left_after_many_requests_ended_every_way(
    outputs: ArOutputs, tokenizer: TokenizerLike
) -> None:
    for i in range(50):
        _, sent = outputs.add(f"r{i}", [prepared(n=2, temperature=1.0), prepared()], ())
        if i % 2:
            outputs.drop(f"r{i}")
        else:
            reason = FinishReason.LENGTH if i % 4 else FinishReason.ERROR
            step(outputs, *(EngineCoreOutput(s.request_id, [], finish_reason=reason) for s in sent))

    assert outputs.num_entries == 0
