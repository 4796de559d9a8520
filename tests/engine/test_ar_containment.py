"""What fails for one request of a real core fails that request, and what the core cannot survive
is its death at once: never a core that lives on and answers nobody."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError

from tests.ar_replicas import Requests, greedy, replica
from tests.tiny_models import make_tiny_llama
from vllm_omni.distributed.omni_connectors.factory import Connector, open_connector
from vllm_omni.distributed.run_directory import RunDirectory
from vllm_omni.engine.messages import StreamTarget
from vllm_omni.errors import BadRequestError
from vllm_omni.inputs.prompt import OmniPrompt

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PROMPT = OmniPrompt(token_ids=[12, 40, 77, 5, 130, 9])


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Room for answers that do not end while a test runs, however fast the machine is.
    return make_tiny_llama(tmp_path_factory.mktemp("llama"), max_positions=16_384)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def thinker(model_dir: Path) -> AsyncIterator[Requests]:
    async with replica(model_dir) as requests:
        yield requests


@pytest.fixture
def voice() -> Iterator[Connector]:
    folder = RunDirectory.create("test-voice")
    connector = open_connector("voice/0", folder.ipc("data"))
    yield connector
    connector.close()
    folder.remove()


async def still_serves(thinker: Requests) -> None:
    assert (await thinker.run("probe", PROMPT, greedy(3))).outputs[0].token_ids
    assert await thinker.client.call_utility_async("num_requests") == 0


async def test_a_stream_that_cannot_be_opened_fails_its_request_alone(thinker: Requests) -> None:
    await thinker.submit("neighbour", PROMPT, greedy(100))
    await thinker.submit("bad", PROMPT, greedy(5), [StreamTarget("nonsense://x", "bad")])
    (failed,) = await thinker.all("bad")
    (served,) = await thinker.all("neighbour")

    assert failed.failure is not None
    assert failed.failure.code == "request_failed"
    assert len(served.text.outputs[0].token_ids) == 100
    await still_serves(thinker)


GRAMMARS: list[dict[str, Any]] = [
    {"regex": "(("},
    {"grammar": "root ::= nothing"},
    {"grammar": 'root ::= "a'},
    {"json": {"type": "no type"}},
    {"json": {"properties": {f"p{i}": {"maxLength": 10_000} for i in range(100)}}},
]


@pytest.mark.parametrize("wrong", GRAMMARS, ids=lambda wrong: str(wrong)[:30])
async def test_a_grammar_that_cannot_be_served_is_the_clients_error(
    thinker: Requests, wrong: dict[str, Any]
) -> None:
    """Refused before the core has it, or told by the core that could not compile it."""
    await thinker.submit("neighbour", PROMPT, greedy(60))
    constrained = greedy(5, structured_outputs=StructuredOutputsParams(**wrong))
    try:
        await thinker.submit("bad", PROMPT, constrained)
        (failed,) = await thinker.all("bad")
        assert failed.failure is not None
        code, field = failed.failure.code, failed.failure.field
    except BadRequestError as error:
        code, field = error.code, error.field
    (served,) = await thinker.all("neighbour")

    assert (code, field) == ("invalid_request", "structured_outputs")
    assert len(served.text.outputs[0].token_ids) == 60
    await still_serves(thinker)


async def test_a_grammar_that_can_be_served_is_followed(thinker: Requests) -> None:
    constrained = greedy(20, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    await thinker.submit("good", PROMPT, constrained)
    (output,) = await thinker.all("good")

    # `greedy` goes on behind the end that the grammar sees.
    assert output.text.outputs[0].text.startswith(("yes", "no"))


async def test_no_descriptor_left_costs_one_request(thinker: Requests, voice: Connector) -> None:
    pid = thinker.client.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest_free(pid), limits[1]))
    try:
        target = StreamTarget(voice.address, "starved")
        await thinker.submit("starved", PROMPT, greedy(5), [target])
        (output,) = await thinker.all("starved")
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)

    assert output.failure is not None
    await still_serves(thinker)
    await thinker.submit("again", PROMPT, greedy(5), [StreamTarget(voice.address, "again")])
    assert (await thinker.all("again"))[-1].failure is None


def lowest_free(pid: int) -> int:
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    return next(number for number in range(len(used) + 1) if number not in used)


async def test_the_core_drops_what_its_client_forgot(thinker: Requests) -> None:
    await thinker.submit("late", PROMPT, greedy(10_000), deadline_s=time.monotonic() + 0.3)
    running = thinker.client._outputs._running["late"]
    assert running.deadline is not None
    running.deadline.cancel()  # as of a client that hangs
    begin_s = time.monotonic()
    (output,) = await thinker.all("late")

    assert output.failure is not None
    assert 1.0 < time.monotonic() - begin_s < 5.0
    await still_serves(thinker)


async def test_a_message_that_cannot_be_read_is_a_death_and_not_a_deaf_core(
    model_dir: Path,
) -> None:
    async with replica(model_dir) as doomed:
        await doomed.submit("running", PROMPT, greedy(10_000))
        core = doomed.client._core
        await core.input_socket.send_multipart([core.core_engine, b"\xfe\xff", b"\xc1"])
        begin_s = time.monotonic()
        error = await asyncio.wait_for(asyncio.shield(doomed.death), 20)

    assert isinstance(error, EngineDeadError)
    assert time.monotonic() - begin_s < 10.0


async def test_five_hundred_aborts_cost_next_to_no_memory(thinker: Requests) -> None:
    pids = (os.getpid(), thinker.client.pid)
    await abort_many(thinker, 100)
    before = [resident_bytes(pid) for pid in pids]
    files = [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]
    await abort_many(thinker, 500)
    grown = [resident_bytes(pid) - rss for pid, rss in zip(pids, before, strict=True)]

    assert max(grown) < 500 * 20_000, grown
    assert [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids] == files
    assert thinker.client._outputs.num_entries == 0


async def abort_many(thinker: Requests, number: int) -> None:
    """At different points of their lives: before, in and after the first step."""
    for i in range(number):
        request_id = f"{number}.{i}"
        params = greedy(400, output_kind=RequestOutputKind.DELTA)
        await thinker.submit(request_id, PROMPT, params, deadline_s=time.monotonic() + 600)
        if i % 3 == 0:
            await thinker.next(request_id)
        await thinker.client.abort_requests_async([request_id])
    assert await thinker.client.call_utility_async("num_requests") == 0


def resident_bytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
