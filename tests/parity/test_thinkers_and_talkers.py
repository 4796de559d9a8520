"""Thinkers write and talkers speak as transformers' do, for prompts of every kind, on three seeds.

The engines of a family start once: for the next seed they take its weights in place. The thinker's
memory is too small for all prompts at once and its steps for some of them, so together they are
cut, preempted and computed again; alone they come whole, or from the prefix cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.parity.greedy import difference
from tests.parity.omni_prompts import NUM_TOKENS, Question, questions, tone
from tests.parity.speech import Chain, Speaker, Spoken, chain
from vllm_omni.config.pipeline import PipelineConfig
from vllm_omni.entrypoints.prompts import parse_prompt
from vllm_omni.model_executor.models.qwen2_5_omni import pipeline as qwen2_5
from vllm_omni.model_executor.models.qwen2_5_omni.tiny import make_tiny as make_qwen2_5
from vllm_omni.model_executor.models.qwen3_omni import pipeline as qwen3
from vllm_omni.model_executor.models.qwen3_omni.tiny import make_tiny as make_qwen3

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

SEEDS = (0, 1, 2)
NUM_FRAMES = 10
REPLIES = {
    "text": 6,
    "image": 1,
    "audio": 7,
    "video": 4,
    "sounding-video": 5,
    "extremes": 3,
    "mixed": 8,
    "mixed-sounding": 2,
}
"""Tokens of the replies that are spoken."""
OTHER_SEEDS = {
    "read": ("text", "image", "audio", "video", "mixed-sounding"),
    "speak": ("text", "image", "mixed-sounding"),
}
"""Kinds of prompts of the seeds after the first; references are slow."""
_REPLY = "<|im_start|>assistant\n"
_NO_TOKEN = 5
"""Ends no reply here."""
HOW: dict[str, dict[str, object]] = {
    "tight": {"num_gpu_blocks_override": 25, "max_num_batched_tokens": 128},
    "as it comes": {},
    "in small chunks": {"long_prefill_token_threshold": 48},
}
"""Options of the thinker's engine."""
ENGINE = {"max_model_len": 768, "block_size": 32}


@dataclass(frozen=True)
class Family:
    make: Callable[[Path, int], Path]
    pipeline: PipelineConfig
    model_class: str
    other_voice: str
    """Not the default."""
    codec_end: int
    """The code with which a talker ends."""


FAMILIES = {
    "qwen3": Family(
        make_qwen3, qwen3.PIPELINE, "Qwen3OmniMoeForConditionalGeneration", "Chelsie", 2150
    ),
    "qwen2.5": Family(
        make_qwen2_5, qwen2_5.PIPELINE, "Qwen2_5OmniForConditionalGeneration", "Ethan", 8294
    ),
}


@dataclass(frozen=True)
class Running:
    first: Path
    """The checkpoint that it has started with."""
    family: Family
    chain: Chain
    how: str


def settings() -> Iterator[Any]:
    """Each family in the tightest engine; `make thorough` has the others."""
    for how in HOW:
        marks = [] if how == "tight" else [pytest.mark.thorough]
        yield from (pytest.param((family, how), marks=marks) for family in FAMILIES)


@dataclass(frozen=True)
class Case:
    running: Running
    asked: dict[str, Question]
    written: dict[str, tuple[list[int], list[int]]]
    spoken: dict[str, Spoken]
    speaker: Speaker


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=settings(), ids="-".join)
async def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Running]:
    name, how = request.param
    family = FAMILIES[name]
    model_dir = family.make(tmp_path_factory.mktemp("first") / "model", SEEDS[0])
    async with chain(model_dir, family.pipeline, **ENGINE, **HOW[how]) as one:
        yield Running(model_dir, family, one, how)


@pytest_asyncio.fixture(scope="class", loop_scope="module", params=SEEDS)
async def case(
    running: Running, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Case:
    family, seed = running.family, request.param
    model_dir = running.first
    if seed != SEEDS[0]:
        model_dir = family.make(tmp_path_factory.mktemp("seed") / "model", seed)
        await running.chain.load(model_dir)
    speaker = Speaker(model_dir, family.model_class)
    asked = questions()
    if seed != SEEDS[0]:
        asked = {name: asked[name] for name in OTHER_SEEDS["read"]}
    written = {name: speaker.answer(question) for name, question in asked.items()}
    spoken = {
        name: speaker.speak(asked[name], written[name][1], num, NUM_FRAMES)
        for name, num in REPLIES.items()
        if seed == SEEDS[0] or name in OTHER_SEEDS["speak"]
    }
    return Case(running, asked, written, spoken, speaker)


class TestThinkersAndTalkers:
    """A class, so that the seeds of a family follow each other."""

    async def test_text_is_the_reference_s(self, case: Case) -> None:
        chain = case.running.chain
        prompts = {name: case.speaker.prompt(question) for name, question in case.asked.items()}
        before, wrong = chain.num_preempted, {}

        for time in ("first", "second"):  # the first time some wait for the processor
            together = await asyncio.gather(*map(chain.write, prompts.values()))
            for (name, (expected, written)), (prompt_ids, text) in zip(
                case.written.items(), together, strict=True
            ):
                assert prompt_ids == expected, f"{name}: the prompt"
                wrong[f"{name}, {time}"] = difference(written, text)
        for name, prompt in prompts.items():
            _, text = await chain.write(prompt)
            wrong[f"{name}, alone"] = difference(case.written[name][1], text)

        assert not any(wrong.values()), wrong
        if case.running.how == "tight" and len(prompts) == len(REPLIES):  # fewer may fit
            assert chain.num_preempted > before, "memory was to be too small for all"

    async def test_codes_are_the_reference_s(self, case: Case) -> None:
        said = await asyncio.gather(*(_speak(case, spoken) for spoken in case.spoken.values()))

        wrong = {
            name: difference(spoken.reply, reply) or spoken.difference(codes)
            for (name, spoken), (reply, codes) in zip(case.spoken.items(), said, strict=True)
        }
        assert not any(wrong.values()), wrong
        assert all(len(codes) <= NUM_FRAMES for _, codes in said)

    async def test_the_same_is_said_of_a_whole_reply_and_of_one_that_comes_step_by_step(
        self, case: Case
    ) -> None:
        chain = case.running.chain
        for name in ("text", "mixed-sounding"):
            spoken = case.spoken[name]
            told = await chain.overhear(spoken.prompt, spoken.end_token)
            assert told.reply == spoken.reply, name
            for stepwise in (False, True):
                codes = await chain.say(told, NUM_FRAMES, stepwise=stepwise)
                assert not spoken.difference(codes), (name, stepwise)

    async def test_the_second_time_equals_the_first_though_its_prompt_is_cached(
        self, case: Case
    ) -> None:
        for name in ("text", "mixed-sounding"):
            first, second = [await _speak(case, case.spoken[name]) for _ in range(2)]
            assert first == second, name

    async def test_the_voice_is_the_reference_s(self, case: Case) -> None:
        voice, (_, written) = case.running.family.other_voice, case.written["text"]
        spoken = case.speaker.speak(case.asked["text"], written, 4, NUM_FRAMES, speaker=voice)

        reply, codes = await _speak(case, spoken, extra_args={"voice": voice.lower()})

        assert reply == spoken.reply
        assert not spoken.difference(codes)
        assert case.spoken["text"].difference(codes), "the other voice says the same"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def narrow(running: Running) -> AsyncIterator[Chain]:
    """Stages with a place for one request each, and with room for a long one."""
    async with chain(
        running.first,
        running.family.pipeline,
        max_batch_size=1,
        max_model_len=2048,
    ) as one:
        yield one


async def test_stages_with_one_place_and_with_eight_hold_up_nobody(
    running: Running, narrow: Chain
) -> None:
    """Texts go on for longer than they are spoken, and wait where there is no place."""
    prompts = [
        parse_prompt({"prompt": f"<|im_start|>user\n{i} is{' more' * i}?<|im_end|>\n{_REPLY}"})
        for i in range(8)
    ]
    wide = running.chain
    await wide.load(running.first)
    for one in (narrow.with_talker_of(wide), wide.with_talker_of(narrow)):
        together = await asyncio.gather(*(one.speak(p, _NO_TOKEN, NUM_FRAMES) for p in prompts))

        alone = [await one.speak(prompt, _NO_TOKEN, NUM_FRAMES) for prompt in prompts[::3]]
        assert together[::3] == alone
        assert all(len(text) == NUM_TOKENS for text, _ in together)


async def test_a_minute_of_audio_is_heard_and_answered(running: Running, narrow: Chain) -> None:
    speaker = Speaker(running.first, running.family.model_class)
    asked = Question(
        ({"type": "audio"}, {"type": "text", "text": "What is it?"}), audio=(tone(60),)
    )
    prompt_ids, written = speaker.answer(asked)
    spoken = speaker.speak(asked, written, 4, NUM_FRAMES)

    read, text = await narrow.write(spoken.prompt)
    reply, codes = await narrow.speak(spoken.prompt, spoken.end_token, NUM_FRAMES)

    assert (read, difference(written, text)) == (prompt_ids, "")
    assert (reply, spoken.difference(codes)) == (spoken.reply, "")


async def test_who_writes_nothing_and_who_says_nothing_end(running: Running) -> None:
    chain = running.chain
    prompt = parse_prompt({"prompt": f"<|im_start|>user\nSay it.<|im_end|>\n{_REPLY}"})
    _, text = await chain.write(prompt)

    assert await chain.speak(prompt, text[0], NUM_FRAMES) == ([], []), "no text, no sound"
    reply, codes = await chain.speak(
        prompt, _NO_TOKEN, NUM_FRAMES, logit_bias={running.family.codec_end: 100.0}
    )
    assert (len(reply), codes) == (NUM_TOKENS, []), "the talker ends where it begins"


async def _speak(
    case: Case, spoken: Spoken, **talker_params: object
) -> tuple[list[int], list[list[int]]]:
    """What our stages say where the reference said this."""
    chain = case.running.chain
    return await chain.speak(spoken.prompt, spoken.end_token, NUM_FRAMES, **talker_params)
