"""Prompts to engine requests: every form a prompt comes in, and every refusal names its field."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from tests.ar_replicas import ENGINE_ARGS, greedy, spec_of
from tests.tiny_models import make_tiny_llama
from vllm_omni.engine.ar_config import build_vllm_config, engine_arguments
from vllm_omni.engine.ar_preparer import ArPreparer
from vllm_omni.engine.ar_prompts import PreparedPrompt, PromptProcessor
from vllm_omni.errors import BadRequestError, ConfigError
from vllm_omni.inputs.prompt import OmniPrompt

CONVERSATION = [{"role": "user", "content": "Who are you?"}]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def preparer(model_dir: Path) -> Iterator[ArPreparer]:
    preparer = ArPreparer("thinker", build_vllm_config(spec_of(model_dir))[0])
    yield preparer
    preparer.shutdown()


async def prepare(
    preparer: ArPreparer, prompt: OmniPrompt, params: object = None, **options: object
) -> PreparedPrompt:
    (prepared,) = await preparer.prepare("r", prompt, params or greedy(4), options)
    return prepared


async def tokens(preparer: ArPreparer, prompt: OmniPrompt) -> list[int]:
    (request,) = (await prepare(preparer, prompt)).requests
    return request.prompt_token_ids


async def test_text_and_its_token_ids_are_the_same_prompt(preparer: ArPreparer) -> None:
    text = OmniPrompt(text="Hello there")
    ids = preparer.tokenizer.encode("Hello there")

    assert await tokens(preparer, text) == await tokens(preparer, OmniPrompt(token_ids=ids))
    assert (await prepare(preparer, text)).text == "Hello there"


async def test_a_conversation_goes_through_the_chat_template(preparer: ArPreparer) -> None:
    rendered = await preparer.render_messages(CONVERSATION)
    by_key = OmniPrompt(extra={"messages": CONVERSATION})
    template = "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n"

    expected = preparer.tokenizer.encode(template, add_special_tokens=False)
    assert await tokens(preparer, rendered) == expected
    assert await tokens(preparer, by_key) == expected
    assert (await prepare(preparer, rendered)).text == template


async def test_a_chat_text_that_a_bridge_changed_gets_no_special_tokens_again(
    preparer: ArPreparer,
) -> None:
    rendered = await preparer.render_messages(CONVERSATION)
    bridged = dataclasses.replace(rendered, engine_input=None)

    assert bridged.extra == {"add_special_tokens": False}
    assert await tokens(preparer, bridged) == await tokens(preparer, rendered)


async def test_template_options_arrive(preparer: ArPreparer) -> None:
    rendered = await preparer.render_messages(CONVERSATION, {"add_generation_prompt": False})

    assert rendered.text is not None
    assert rendered.text.endswith("<|im_end|>\n")


async def test_options_of_vllm_arrive(preparer: ArPreparer) -> None:
    prepared = await prepare(
        preparer,
        OmniPrompt(token_ids=[5, 6]),
        priority=3,
        trace_headers={"traceparent": "x"},
        reasoning_ended=True,
        prompt_text="shown",
    )
    (request,) = prepared.requests

    assert (request.priority, request.trace_headers) == (3, {"traceparent": "x"})
    assert request.reasoning_ended is True
    assert prepared.text == "shown"


async def test_unset_max_tokens_fill_the_context(preparer: ArPreparer) -> None:
    (request,) = (
        await prepare(preparer, OmniPrompt(token_ids=[5] * 10), SamplingParams(max_tokens=None))
    ).requests

    assert request.sampling_params.max_tokens == 512 - 10


@pytest.mark.parametrize(
    ("prompt", "params", "options", "field"),
    [
        (OmniPrompt(text=""), None, {}, "prompt"),
        (OmniPrompt(text="one two " * 400), None, {}, "input_tokens"),
        (OmniPrompt(token_ids=[1] * 600), None, {}, "input_tokens"),
        (OmniPrompt(token_ids=[384]), None, {}, "prompt"),
        (OmniPrompt(extra={"messages": []}), None, {}, "messages"),
        (OmniPrompt(extra={"messages": "hello"}), None, {}, "messages"),
        (OmniPrompt(extra={"messages": [{"role": "user", "content": 7}]}), None, {}, "messages"),
        (OmniPrompt(extra={"messages": [7]}), None, {}, "messages"),
        (OmniPrompt(text="hi", extra={"multi_modal_dat": {}}), None, {}, "multi_modal_dat"),
        (OmniPrompt(text="hi"), object(), {}, "sampling_params"),
        (OmniPrompt(text="hi"), greedy(4, logprobs=1000), {}, "logprobs"),
        (OmniPrompt(text="hi"), greedy(4, allowed_token_ids=[9999]), {}, "allowed_token_ids"),
        (OmniPrompt(text="hi"), greedy(4, stream_interval=2**70), {}, "stream_interval"),
        (OmniPrompt(text="hi"), greedy(4, temperature=1.0, top_k=2**64), {}, "top_k"),
        (
            OmniPrompt(text="hi"),
            greedy(4, structured_outputs=StructuredOutputsParams(json={"maximum": 2**64})),
            {},
            "structured_outputs",
        ),
        (
            OmniPrompt(text="hi"),
            greedy(4, structured_outputs=StructuredOutputsParams(regex="((")),
            {},
            "structured_outputs",
        ),
        (OmniPrompt(text="hi"), greedy(4, extra_args={"omni_targets": []}), {}, "extra_args"),
        (OmniPrompt(text="hi"), None, {"prioritty": 1}, "prioritty"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, OmniPrompt | dict) else None,
)
async def test_a_refusal_names_its_field(
    preparer: ArPreparer, prompt: OmniPrompt, params: object, options: dict[str, object], field: str
) -> None:
    with pytest.raises(BadRequestError) as refusal:
        await preparer.prepare("r", prompt, params or greedy(4), options)

    assert refusal.value.field == field, str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_the_context_of_a_token_stream_is_plain_data(preparer: ArPreparer, model_dir: Path) -> None:
    params = greedy(4, stop=["x"], include_stop_str_in_output=True)

    assert preparer.source_context(params) == {
        "tokenizer_dir": str(model_dir),
        "stop": ["x"],
        "include_stop_str_in_output": True,
        "skip_special_tokens": True,
    }


def test_two_loops_tokenize_at_once(preparer: ArPreparer, model_dir: Path) -> None:
    """Each side has a tokenizer of its own: sharing one raises "Already borrowed"."""
    other = PromptProcessor("thinker", build_vllm_config(spec_of(model_dir))[0])
    assert other.renderer.tokenizer is not preparer.tokenizer
    assert other.renderer.tokenizer._tokenizer is not preparer.tokenizer._tokenizer
    text = OmniPrompt(text="Hello there, how are you today? " * 20)

    async def both_sides() -> None:
        def elsewhere() -> None:
            async def work() -> None:
                for _ in range(60):
                    await other.process("r", text, greedy(4), {})

            asyncio.run(work())

        thread = asyncio.create_task(asyncio.to_thread(elsewhere))
        while not thread.done():
            await asyncio.gather(*(prepare(preparer, text) for _ in range(8)))
        await thread

    asyncio.run(both_sides())
    other.shutdown()


def test_building_a_config_leaves_this_process_s_environment_alone(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VLLM_WORKER_MULTIPROC_METHOD", "TORCHDYNAMO_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    _, env = build_vllm_config(spec_of(model_dir))

    assert dict(os.environ) == before
    assert env["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert env["TORCHDYNAMO_DISABLE"] == "1"


def test_each_replica_gets_a_config_of_its_own(model_dir: Path) -> None:
    first, second = (build_vllm_config(spec_of(model_dir))[0] for _ in range(2))

    assert first.cache_config is not second.cache_config
    assert first.cache_config.kv_cache_memory_bytes == ENGINE_ARGS["kv_cache_memory_bytes"]
    assert first.parallel_config.distributed_executor_backend.endswith("StageExecutor")


def test_remote_code_is_trusted_only_on_demand(model_dir: Path) -> None:
    assert "trust_remote_code" not in engine_arguments(spec_of(model_dir))
    spec = spec_of(model_dir, engine_args={"trust_remote_code": True})
    assert engine_arguments(spec)["trust_remote_code"] is True


def test_several_ranks_use_vllm_s_own_executor(model_dir: Path) -> None:
    arguments = engine_arguments(spec_of(model_dir, devices=("cuda:0", "cuda:1")))

    assert arguments["tensor_parallel_size"] == 2
    assert arguments["distributed_executor_backend"] == "mp"
    assert "enforce_eager" not in arguments


def test_a_checkpoint_without_config_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        build_vllm_config(spec_of(tmp_path))

    assert str(refusal.value).startswith("stage 'thinker': ")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "text", ["{}", "[]", '{"version": "1.0", "added_tokens": [], "model": {}}']
)
def test_a_damaged_tokenizer_ends_the_start_in_one_line(
    model_dir: Path, tmp_path: Path, text: str
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(model_dir, damaged)
    (damaged / "tokenizer.json").write_text(text)

    with pytest.raises(ConfigError, match=r"^stage 'thinker': .*[Tt]okenizer"):
        ArPreparer("thinker", build_vllm_config(spec_of(damaged))[0])
