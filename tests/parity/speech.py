"""What the talkers of all families are held to: the reference's codes, with a real thinker before.

Sampling is off everywhere. A reply is ended by a token that its thinker would have written anyway,
as random weights seldom choose their end.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.metrics.stats import IterationStats

from tests.ar_replicas import Requests, greedy, replica
from tests.parity.greedy import difference
from tests.parity.omni_prompts import NUM_TOKENS, Question, Reference
from tests.parity.speech_ends import WAIT_S, Heard
from vllm_omni.config.pipeline import PipelineConfig
from vllm_omni.core.conditioning import KIND_TOKENS
from vllm_omni.distributed.omni_connectors.base import Frame
from vllm_omni.distributed.omni_connectors.factory import Connector, open_connector
from vllm_omni.distributed.run_directory import RunDirectory
from vllm_omni.engine.messages import StreamSource, StreamTarget
from vllm_omni.entrypoints.prompts import parse_prompt
from vllm_omni.inputs.prompt import OmniPrompt

ENGINE_ARGS: Mapping[str, object] = {
    "dtype": "float32",
    "max_model_len": 2048,
    "kv_cache_memory_bytes": 64 << 20,
}

_IDS = itertools.count()
"""Requests of all chains: they may share a replica."""


@dataclass(frozen=True)
class Spoken:
    """One reply of the reference."""

    prompt: OmniPrompt
    reply: list[int]
    """Without `end_token`, which ended it."""
    end_token: int
    codes: list[int]
    """Frame after frame, all groups of each."""

    def difference(self, codes: Sequence[Sequence[int]]) -> str:
        """Where these codes are not the reference's; empty when they are."""
        return difference(self.codes, [code for frame in codes for code in frame])


class Speaker(Reference):
    """A reference model that speaks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        talker = self.model.talker.config
        if not hasattr(talker, "audio_config"):
            # Its positions of audio look there; transformers 5.19 stops with an AttributeError.
            talker.audio_config = self.model.config.thinker_config.audio_config
        if not hasattr(talker, "num_code_groups"):
            self.model.talker.forward = _with_mask(self.model.talker.forward)

    def prompt(self, question: Question) -> OmniPrompt:
        """The question as a stage takes it."""
        return parse_prompt(question.prompt(self.text(question)))

    def speak(
        self,
        question: Question,
        written: Sequence[int],
        num_tokens: int,
        num_frames: int,
        **options: Any,
    ) -> Spoken:
        """The codes of the first tokens of what `answer` has written, about `num_tokens`."""
        # The first one from there on that ends the reply there and not before.
        end_token = next(
            token for i, token in enumerate(written) if i >= num_tokens and token not in written[:i]
        )
        inputs = self.inputs(question)
        with torch.inference_mode():
            sequence, codes = self._generate(inputs, end_token, num_frames, options)
        reply = sequence[0, inputs["input_ids"].shape[1] :].tolist()
        assert reply[-1] == end_token, "the reference ended with its end token"
        return Spoken(self.prompt(question), reply[:-1], end_token, codes)

    def _generate(
        self,
        inputs: dict[str, Any],
        end_token: int,
        num_frames: int,
        options: dict[str, Any],
    ) -> tuple[Any, list[int]]:
        heard: list[list[int]] = []
        with pytest.MonkeyPatch.context() as patched:
            if hasattr(self.model.talker, "code_predictor"):
                self._hear_frames(patched, heard)
            else:
                self._hear_codes(patched, heard)
            sequence, _ = self.model.generate(
                **inputs,
                thinker_do_sample=False,
                thinker_max_new_tokens=NUM_TOKENS,
                thinker_eos_token_id=end_token,
                talker_do_sample=False,
                talker_max_new_tokens=num_frames,
                talker_repetition_penalty=1.0,
                **options,
            )
        return sequence, heard[0]

    def _hear_frames(self, patched: pytest.MonkeyPatch, heard: list[list[int]]) -> None:
        """Listen to a talker whose first code of a frame is followed by a predictor's."""
        talk = self.model.talker.generate

        def talked(**given: Any) -> Any:
            result = talk(**_without_pixels(given))
            frames = [h[-1][0].tolist() for h in result.hidden_states if h[-1] is not None]
            heard.append([code for frame in frames for code in frame])
            return result

        patched.setattr(self.model.talker, "generate", talked)

    def _hear_codes(self, patched: pytest.MonkeyPatch, heard: list[list[int]]) -> None:
        """Listen to a talker of one code for each frame."""
        talk = self.model.talker.generate

        def talked(**given: Any) -> Any:
            sequences = talk(**_without_pixels(given))
            sampled = sequences[0, given["input_ids"].shape[1] :].tolist()
            heard.append([code for code in sampled if code not in given["eos_token_id"]])
            return sequences

        patched.setattr(self.model.talker, "generate", talked)


def _without_pixels(given: dict[str, Any]) -> dict[str, Any]:
    """Passed on to the talker by mistake; its own generate refuses them."""
    return {key: value for key, value in given.items() if not key.startswith("pixel_values")}


def _with_mask(forward: Any) -> Any:
    """A forward that always has its mask.

    The talker of one code adds the beginning of the codec to its prompt, and takes positions of
    media, only where there is a mask; transformers 5.19 drops a mask of ones before the forward.
    """

    @functools.wraps(forward)
    def masked(**given: Any) -> Any:
        if given.get("attention_mask") is None:
            new = given["inputs_embeds"] if given.get("inputs_embeds") is not None else None
            new = given["input_ids"] if new is None else new
            past = given.get("past_key_values")
            length = new.shape[1] + (past.get_seq_length() if past is not None else 0)
            given["attention_mask"] = torch.ones(1, length, dtype=torch.long)
        return forward(**given)

    return masked


class Told:
    """What a thinker tells its talker in the course of one request, frame by frame."""

    def __init__(self, connector: Connector, stream: str) -> None:
        self.target = StreamTarget(connector.address, stream, conditions=True)
        self.frames: list[tuple[dict[str, Any], bytes]] = []
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        connector.receiver.subscribe(stream, self._take)

    def _take(self, frame: Frame) -> None:
        if frame.end is None:
            self.frames.append((dict(frame.meta), bytes(frame.payload)))
        else:
            self._loop.call_soon_threadsafe(self.end.set_result, frame.end)
        frame.release()

    @property
    def reply(self) -> list[int]:
        payloads = [payload for meta, payload in self.frames if meta["kind"] == KIND_TOKENS]
        return np.frombuffer(b"".join(payloads), "<u4").tolist()


class Chain:
    """Thinker and talker, two replicas, and the end that a vocoder would have."""

    def __init__(
        self, pipeline: PipelineConfig, thinker: Requests, talker: Requests, connector: Connector
    ) -> None:
        (edge,) = (edge for edge in pipeline.edges if edge.capture is not None)
        self._pipeline = pipeline
        self._bridge = edge.bridge
        self.thinker = thinker
        self.talker = talker
        self.num_preempted = 0
        """Requests of the thinker that gave their memory to others and were computed again."""
        self._connector = connector
        thinker.client.record = self._record

    def _record(self, _: object, iteration: IterationStats | None) -> None:
        if iteration is not None:
            self.num_preempted += iteration.num_preempted_reqs

    def with_talker_of(self, other: Chain) -> Chain:
        """This thinker before the talker of another chain of the family."""
        return Chain(self._pipeline, self.thinker, other.talker, self._connector)

    async def load(self, model_dir: Path) -> None:
        """Take the weights of another checkpoint of the same shape; nothing may be running."""
        await asyncio.gather(self.thinker.load(model_dir), self.talker.load(model_dir))

    async def write(self, prompt: OmniPrompt) -> tuple[list[int], list[int]]:
        """Token ids of the prompt as the thinker has read it, and of its whole answer."""
        params = greedy(NUM_TOKENS, min_tokens=NUM_TOKENS)
        output = await self.thinker.run(f"r{next(_IDS)}", prompt, params)
        return list(output.prompt_token_ids or ()), list(output.outputs[0].token_ids)

    async def begin(
        self,
        prompt: OmniPrompt,
        num_frames: int,
        thinker_params: Mapping[str, object],
        talker_params: Mapping[str, object],
    ) -> tuple[str, Heard]:
        """Submit a request to both, as the orchestrator does."""
        request_id = f"r{next(_IDS)}"
        states, codes = f"{request_id}/states", f"{request_id}/codes"
        heard = Heard(self._connector, codes)
        address = self.talker.client.data_address
        assert address is not None, "a talker takes streams"
        await self.thinker.submit(
            request_id,
            prompt,
            greedy(64, **thinker_params),
            [StreamTarget(address, states, conditions=True)],
        )
        await self.talker.submit(
            request_id,
            None,
            greedy(num_frames, **{"ignore_eos": False, **talker_params}),
            [heard.target],
            sources=[StreamSource(states, "thinker", self._bridge)],
        )
        return request_id, heard

    async def overhear(self, prompt: OmniPrompt, end_token: int) -> Told:
        """What the thinker tells while it writes a reply, to nobody."""
        request_id = f"r{next(_IDS)}"
        told = Told(self._connector, f"{request_id}/states")
        params = greedy(NUM_TOKENS, stop_token_ids=[end_token])
        await self.thinker.submit(request_id, prompt, params, [told.target])
        async with asyncio.timeout(WAIT_S):
            assert await told.end == "stop"
        assert (await self.thinker.all(request_id))[-1].failure is None
        return told

    async def say(self, told: Told, num_frames: int, *, stepwise: bool) -> list[list[int]]:
        """The codes for what was overheard: all of it is here at first, or each step waits for
        what the talker makes of the one before."""
        request_id = f"r{next(_IDS)}"
        states, codes = f"{request_id}/states", f"{request_id}/codes"
        heard, sender = Heard(self._connector, codes), self._connector.sender
        params = greedy(num_frames, ignore_eos=False)
        source = StreamSource(states, "thinker", self._bridge)
        address = self.talker.client.data_address
        assert address is not None, "a talker takes streams"
        sender.open(address, states)
        if stepwise:
            await self.talker.submit(request_id, None, params, [heard.target], sources=[source])
        num_tokens = 0
        for meta, payload in told.frames:
            sender.push(states, payload, meta)
            if stepwise and meta["kind"] == KIND_TOKENS:
                num_tokens += len(payload) // 4
                # A token may be spoken once the next one is there: its state comes with that one.
                assert len(await heard.frames(num_tokens - 1)) <= num_tokens
        sender.end(states, await told.end)
        if not stepwise:
            await self.talker.submit(request_id, None, params, [heard.target], sources=[source])
        said = await heard.all()
        assert heard.end in ("stop", "length"), heard.error
        assert (await self.talker.all(request_id))[-1].failure is None
        return said

    async def speak(
        self, prompt: OmniPrompt, end_token: int, num_frames: int, **talker_params: object
    ) -> tuple[list[int], list[list[int]]]:
        """The reply's tokens and its codes."""
        thinker_params = {"stop_token_ids": [end_token]}
        request_id, heard = await self.begin(prompt, num_frames, thinker_params, talker_params)
        codes = await heard.all()
        assert heard.end in ("stop", "length"), heard.error
        text, sound = await asyncio.gather(
            self.thinker.all(request_id), self.talker.all(request_id)
        )
        assert text[-1].failure is sound[-1].failure is None
        written = list(text[-1].text.outputs[0].token_ids)
        return written[:-1] if written[-1] == end_token else written, codes


@asynccontextmanager
async def chain(
    model_dir: Path, pipeline: PipelineConfig, *, max_batch_size: int = 8, **thinker_args: object
) -> AsyncIterator[Chain]:
    """Both replicas of a family."""
    thinker, talker = (pipeline.stages[pipeline.stage_id(n)] for n in ("thinker", "talker"))
    (edge,) = (edge for edge in pipeline.edges if edge.capture is not None)
    shared = {"max_batch_size": max_batch_size, "start_timeout_s": 300.0}
    async with AsyncExitStack() as stack:
        folder = RunDirectory.create("test-chain")
        stack.callback(folder.remove)
        connector = open_connector("test/0", folder.ipc("data"))
        stack.callback(connector.close)
        thinking = replica(
            model_dir,
            hf_config=thinker.hf_config,
            capture=edge.capture,
            engine_args={**ENGINE_ARGS, **thinker_args},
            **shared,
        )
        talking = replica(
            model_dir,
            stage="talker",
            has_sources=True,
            hf_config=talker.hf_config,
            engine_args=dict(ENGINE_ARGS),
            **shared,
        )
        both = await asyncio.gather(*map(stack.enter_async_context, (thinking, talking)))
        yield Chain(pipeline, *both, connector)
