"""Tokens of a real replica reach another replica's receiver, in order, with an explicit end."""

from __future__ import annotations

import asyncio
import queue
import threading
from array import array
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from vllm.sampling_params import RequestOutputKind

from tests.ar_replicas import Requests, greedy, replica
from tests.tiny_models import make_tiny_llama
from vllm_omni.distributed.omni_connectors.base import Frame
from vllm_omni.distributed.omni_connectors.factory import Connector, open_connector
from vllm_omni.distributed.run_directory import RunDirectory
from vllm_omni.engine.messages import StreamTarget
from vllm_omni.errors import BadRequestError
from vllm_omni.inputs.prompt import OmniPrompt

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PROMPT = OmniPrompt(token_ids=[12, 40, 77, 5, 130, 9])


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def thinker(model_dir: Path) -> AsyncIterator[Requests]:
    async with replica(model_dir) as requests:
        yield requests


@pytest.fixture(scope="module")
def voice() -> Iterator[Connector]:
    folder = RunDirectory.create("test-voice")
    connector = open_connector("voice/0", folder.ipc("data"))
    yield connector
    connector.close()
    folder.remove()


class Stream:
    """What arrives of one stream."""

    def __init__(self, voice: Connector, name: str) -> None:
        self.target = StreamTarget(voice.address, name)
        self._frames: queue.Queue[tuple[list[int], str | None, str]] = queue.Queue()
        self.has_begun = threading.Event()
        voice.receiver.subscribe(name, self._take)

    def _take(self, frame: Frame) -> None:
        tokens = array("I", bytes(frame.payload))
        if frame.end is None:
            assert frame.meta == {"kind": "tokens"}
        self._frames.put((list(tokens), frame.end, frame.error))
        self.has_begun.set()
        frame.release()

    def all(self) -> tuple[list[list[int]], str, str]:
        """Tokens of every frame, the reason of the end and its message."""
        steps: list[list[int]] = []
        while True:
            tokens, end, error = self._frames.get(timeout=20)
            if tokens:
                steps.append(tokens)
            if end is not None:
                return steps, end, error


async def test_tokens_arrive_step_by_step_and_end_with_the_finish_reason(
    thinker: Requests, voice: Connector
) -> None:
    stream = Stream(voice, "plain")
    await thinker.submit("plain", PROMPT, greedy(20), targets=[stream.target])
    (output,) = await thinker.all("plain")
    steps, end, _ = stream.all()

    assert [t for step in steps for t in step] == list(output.text.outputs[0].token_ids)
    assert len(steps) == 20
    assert end == "length"


async def test_a_stop_token_is_not_part_of_the_stream(thinker: Requests, voice: Connector) -> None:
    tokens = list((await thinker.run("look", PROMPT, greedy(12))).outputs[0].token_ids)
    stop = next(t for t in tokens[4:] if tokens.index(t) >= 4)
    stream = Stream(voice, "stop-token")
    params = greedy(12, stop_token_ids=[stop])
    await thinker.submit("stop-token", PROMPT, params, targets=[stream.target])
    (output,) = await thinker.all("stop-token")
    steps, end, _ = stream.all()

    assert output.text.outputs[0].stop_reason == stop
    assert [t for step in steps for t in step] == tokens[: tokens.index(stop)]
    assert end == "stop"


async def test_a_stop_string_ends_the_stream_with_stop_not_abort(
    thinker: Requests, voice: Connector
) -> None:
    text = (await thinker.run("text", PROMPT, greedy(20))).outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    stream = Stream(voice, "stop-string")
    await thinker.submit("stop-string", PROMPT, greedy(400, stop=[stop]), [stream.target])
    (output,) = await thinker.all("stop-string")
    _, end, _ = stream.all()

    assert output.text.outputs[0].stop_reason == stop
    assert end == "stop"


async def test_an_abort_ends_the_stream_explicitly(thinker: Requests, voice: Connector) -> None:
    stream = Stream(voice, "abort")
    params = greedy(500, output_kind=RequestOutputKind.DELTA)
    await thinker.submit("abort", PROMPT, params, targets=[stream.target])
    await thinker.next("abort")
    await thinker.client.abort_requests_async(["abort"])

    assert stream.all()[1] == "abort"


async def test_one_request_feeds_several_targets(thinker: Requests, voice: Connector) -> None:
    streams = [Stream(voice, f"several-{i}") for i in range(2)]
    await thinker.submit("several", PROMPT, greedy(5), [s.target for s in streams])
    await thinker.all("several")

    first, second = (stream.all() for stream in streams)
    assert first == second
    assert len(first[0]) == 5


async def test_a_target_that_is_gone_does_not_hold_up_the_text(thinker: Requests) -> None:
    folder = RunDirectory.create("gone")
    address = folder.ipc("data")
    folder.remove()
    await thinker.submit("deaf", PROMPT, greedy(30), [StreamTarget(address, "deaf")])

    assert (await thinker.all("deaf"))[-1].failure is None


async def test_several_choices_cannot_share_a_stream(thinker: Requests) -> None:
    with pytest.raises(BadRequestError) as refusal:
        await thinker.submit(
            "many", PROMPT, greedy(4, n=2, temperature=1.0), [StreamTarget("a", "b")]
        )
    assert refusal.value.field == "n"


async def test_the_replica_failing_fails_its_streams(model_dir: Path, voice: Connector) -> None:
    async with replica(model_dir) as dying:
        stream = Stream(voice, "dying")
        await dying.submit("dying", PROMPT, greedy(500), targets=[stream.target])
        assert await asyncio.to_thread(stream.has_begun.wait, 20)
        await dying.client.shutdown_async(10.0)
        _, end, error = stream.all()

    assert end in ("abort", "error"), error
