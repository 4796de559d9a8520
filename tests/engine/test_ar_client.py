"""A real engine core process behind the stage client, on a tiny random Llama."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from vllm.sampling_params import RequestOutputKind, SamplingParams

from tests.ar_replicas import Requests, greedy, replica
from tests.tiny_models import make_tiny_llama
from vllm_omni.engine.ar_config import build_vllm_config
from vllm_omni.engine.ar_preparer import ArPreparer
from vllm_omni.engine.messages import StageRequest
from vllm_omni.errors import BadRequestError, DeadlineExceededError
from vllm_omni.inputs.prompt import OmniPrompt

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [12, 40, 77, 5, 130, 9]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def thinker(model_dir: Path) -> AsyncIterator[Requests]:
    async with replica(model_dir) as requests:
        yield requests


def reference_tokens(model_dir: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """What transformers writes, greedily."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


async def test_greedy_tokens_equal_the_reference(thinker: Requests, model_dir: Path) -> None:
    output = await thinker.run("greedy", OmniPrompt(token_ids=PROMPT), greedy(24))

    assert list(output.outputs[0].token_ids) == reference_tokens(model_dir, PROMPT, 24)
    assert output.request_id == "greedy"


async def test_deltas_join_to_the_final_text(thinker: Requests) -> None:
    final = await thinker.run("final", OmniPrompt(token_ids=PROMPT), greedy(20))
    params = greedy(20, output_kind=RequestOutputKind.DELTA)
    await thinker.submit("deltas", OmniPrompt(token_ids=PROMPT), params)
    deltas = await thinker.all("deltas")

    assert "".join(o.text.outputs[0].text for o in deltas) == final.outputs[0].text
    assert [t for o in deltas for t in o.text.outputs[0].token_ids] == list(
        final.outputs[0].token_ids
    )
    assert [o.finished for o in deltas] == [False] * (len(deltas) - 1) + [True]


async def test_a_stop_string_ends_the_text_before_it_and_frees_the_core(thinker: Requests) -> None:
    whole = await thinker.run("whole", OmniPrompt(token_ids=PROMPT), greedy(20))
    text = whole.outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    params = greedy(400, stop=[stop])
    stopped = await thinker.run("stopped", OmniPrompt(token_ids=PROMPT), params)

    assert stopped.outputs[0].text == text[: text.index(stop)]
    assert stopped.outputs[0].stop_reason == stop
    await nothing_runs(thinker)


async def test_logprobs_come_with_every_delta(thinker: Requests) -> None:
    params = greedy(6, logprobs=3, output_kind=RequestOutputKind.DELTA)
    await thinker.submit("logprobs", OmniPrompt(token_ids=PROMPT), params)
    completions = [o.text.outputs[0] for o in await thinker.all("logprobs")]

    assert [len(c.logprobs) for c in completions] == [len(c.token_ids) for c in completions]
    for completion in completions:
        for token_id, logprobs in zip(completion.token_ids, completion.logprobs, strict=True):
            assert len(logprobs) == 3
            assert max(logprobs.values(), key=lambda entry: entry.logprob) is logprobs[token_id]


async def test_n_choices_come_back_under_one_id(thinker: Requests) -> None:
    params = SamplingParams(
        n=3, seed=7, max_tokens=8, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )
    output = await thinker.run("choices", OmniPrompt(token_ids=PROMPT), params)

    assert [c.index for c in output.outputs] == [0, 1, 2]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 3


async def test_a_list_of_prompts_finishes_once_and_in_order(thinker: Requests) -> None:
    prompts = [OmniPrompt(token_ids=PROMPT[i:]) for i in range(3)]
    alone = [await thinker.run(f"alone{i}", p, greedy(8 - i)) for i, p in enumerate(prompts)]
    params = greedy(8)
    await thinker.submit("together", prompts, params)
    together = await thinker.all("together")

    assert [o.finished for o in together] == [False, False, True]
    for part, reference in zip(together, alone, strict=True):
        count = len(reference.outputs[0].token_ids)
        assert part.text.outputs[0].token_ids[:count] == reference.outputs[0].token_ids


async def test_eight_together_equal_each_alone(thinker: Requests) -> None:
    prompts = [OmniPrompt(token_ids=[*PROMPT, 20 + i]) for i in range(8)]
    alone = [await thinker.run(f"solo{i}", p, greedy(16)) for i, p in enumerate(prompts)]
    together = await asyncio.gather(
        *(thinker.run(f"batch{i}", p, greedy(16)) for i, p in enumerate(prompts))
    )

    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]


async def test_an_abort_frees_the_core_and_says_nothing_more(thinker: Requests) -> None:
    params = greedy(500, output_kind=RequestOutputKind.DELTA)
    await thinker.submit("leaver", OmniPrompt(token_ids=PROMPT[:4]), params)
    await thinker.next("leaver")
    await thinker.client.abort_requests_async(["leaver", "never seen"])
    while thinker.num_unread("leaver"):
        assert not (await thinker.next("leaver")).finished

    await nothing_runs(thinker)
    assert thinker.num_unread("leaver") == 0


async def test_a_request_ends_at_its_deadline(thinker: Requests) -> None:
    params = greedy(500, output_kind=RequestOutputKind.FINAL_ONLY)
    await thinker.submit(
        "late", OmniPrompt(token_ids=PROMPT), params, deadline_s=time.monotonic() + 0.05
    )
    (output,) = await thinker.all("late")

    assert output.failure is not None
    assert output.failure.code == DeadlineExceededError.code
    await nothing_runs(thinker)


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (OmniPrompt(token_ids=[]), "prompt"),
        (OmniPrompt(token_ids=[3] * 512), "prompt"),
        (OmniPrompt(token_ids=[3] * 2000), "prompt"),
        (OmniPrompt(token_ids=[3, 100_000]), "prompt"),
        (OmniPrompt(token_ids=[3, -1]), "prompt"),
        (OmniPrompt(text=""), "prompt"),
        (OmniPrompt(), "prompt"),
        (object(), "prompt"),
        ([], "prompt"),
    ],
    ids=["empty", "full", "long", "vocabulary", "negative", "no text", "nothing", "type", "none"],
)
async def test_what_would_kill_the_core_is_refused(
    thinker: Requests, prompt: object, field: str
) -> None:
    with pytest.raises(BadRequestError) as refusal:
        await thinker.submit("bad", prompt, greedy(4))

    assert refusal.value.field is not None
    await still_serves(thinker)


async def test_a_live_id_is_refused(thinker: Requests) -> None:
    await thinker.submit("twin", OmniPrompt(token_ids=PROMPT), greedy(60))
    with pytest.raises(BadRequestError):
        await thinker.client.add_request_async(
            StageRequest("twin", 0, OmniPrompt(token_ids=PROMPT), greedy(4))
        )

    assert (await thinker.all("twin"))[-1].failure is None


async def test_a_prepared_request_can_be_submitted_again(
    thinker: Requests, model_dir: Path
) -> None:
    preparer = ArPreparer("thinker", build_vllm_config(thinker.spec)[0])
    try:
        prompt = OmniPrompt(text="Hello there")
        prepared = await preparer.prepare("again", prompt, greedy(8), {})
        first = await thinker.run("again", prepared, greedy(8))
        second = await thinker.run("again", prepared, greedy(8))
    finally:
        preparer.shutdown()

    assert first.prompt == "Hello there"
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


async def test_a_utility_answers_and_an_unknown_one_fails(thinker: Requests) -> None:
    assert await thinker.client.call_utility_async("is_sleeping") is False
    with pytest.raises(Exception, match="no_such_method"):
        await thinker.client.call_utility_async("no_such_method")


async def test_two_hundred_requests_ended_every_way_leave_nothing(thinker: Requests) -> None:
    prompt = OmniPrompt(token_ids=PROMPT)
    await thinker.run("before", prompt, greedy(2))
    files = open_files(os.getpid()), open_files(thinker.client.pid)
    for i in range(100):
        await thinker.submit(f"left{i}", prompt, greedy(400))
        await thinker.run(f"done{i}", prompt, greedy(1))
        await thinker.client.abort_requests_async([f"left{i}"])

    await nothing_runs(thinker)
    assert repr(thinker.client) == "<ArClient thinker/0 live requests=0>"
    assert (open_files(os.getpid()), open_files(thinker.client.pid)) == files


async def test_an_idle_core_uses_next_to_no_cpu(thinker: Requests) -> None:
    await nothing_runs(thinker)
    before = cpu_s(thinker.client.pid)
    await asyncio.sleep(3.0)

    assert cpu_s(thinker.client.pid) - before <= 0.06 + 0.02, (
        "two hundredths of a core, and one tick"
    )


async def nothing_runs(thinker: Requests) -> None:
    """Every request has left the scheduler; the core answers between two steps."""
    counts = await thinker.client.call_utility_async("num_requests")
    assert counts == 0


async def still_serves(thinker: Requests) -> None:
    output = await thinker.run("probe", OmniPrompt(token_ids=PROMPT), greedy(1))
    assert len(output.outputs[0].token_ids) == 1


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
