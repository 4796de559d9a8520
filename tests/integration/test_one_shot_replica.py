"""A one-shot replica in its own process: what the orchestrator sees of its life and death."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from tests.fakes import eventually
from tests.generation.replicas import Listener, listen, pid_of, running, say
from tests.generation.tone import spoken
from vllm_omni.distributed.omni_connectors.factory import Connector, open_connector
from vllm_omni.distributed.run_directory import RunDirectory
from vllm_omni.engine import process_client
from vllm_omni.engine.messages import StageRequest
from vllm_omni.engine.one_shot_client import OneShotClient
from vllm_omni.errors import BadRequestError, DeadlineExceededError
from vllm_omni.generation.report_stream import BrokenReportsError
from vllm_omni.inputs.prompt import OmniPrompt


@pytest.fixture
def thinker() -> Iterator[Connector]:
    directory = RunDirectory.create("thinker/0")
    connector = open_connector("thinker/0", directory.ipc("data"))
    yield connector
    connector.close()
    directory.remove()


async def test_eight_at_once_give_what_each_gives_alone() -> None:
    texts = {f"r{i}": " ".join(f"word{i * j}" for j in range(i + 1)) for i in range(8)}
    async with running() as client:
        listener = Listener(client)
        for request_id, text in texts.items():
            await client.add_request_async(say(request_id, text))
        await listener.until_ended(*texts)

    assert listener.pcm == {request_id: spoken(text) for request_id, text in texts.items()}


async def test_a_stream_of_another_replica_is_spoken_while_it_runs(thinker: Connector) -> None:
    async with running() as client:
        listener = Listener(client)
        await client.add_request_async(listen("a", "s"))
        assert client.data_address is not None
        thinker.sender.open(client.data_address, "s")
        thinker.sender.push("s", b"hello wor")
        await listener.next()
        assert listener.pcm["a"] == spoken("hello")

        thinker.sender.push("s", b"ld again")
        thinker.sender.end("s")
        await listener.until_ended("a")

    assert listener.pcm["a"] == spoken("hello world again")


async def test_a_stream_that_ends_empty_ends_the_request(thinker: Connector) -> None:
    async with running() as client:
        listener = Listener(client)
        await client.add_request_async(listen("a", "s"))
        thinker.sender.open(str(client.data_address), "s")
        thinker.sender.end("s")
        await listener.until_ended("a")

    assert listener.ended["a"].failure is None
    assert not listener.pcm


_DYING_SENDER = """
import os, signal, sys
from vllm_omni.distributed.omni_connectors.factory import open_connector
connector = open_connector("thinker/0", sys.argv[1])
connector.sender.open(sys.argv[2], "s")
connector.sender.push("s", b"hello world ")
print("pushed", flush=True)
signal.pause()
"""


async def test_a_stream_whose_sender_is_killed_fails_naming_the_stage(tmp_path: Path) -> None:
    async with running() as client:
        listener = Listener(client)
        await client.add_request_async(listen("a", "s"))
        arguments = [f"ipc://{tmp_path}/data", str(client.data_address)]
        sender = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _DYING_SENDER, *arguments, stdout=subprocess.PIPE
        )
        while "a" not in listener.pcm:
            await listener.next()
        sender.kill()
        begin = time.monotonic()
        await listener.until_ended("a")
        assert time.monotonic() - begin < 1.0
        await sender.communicate()

    failure = listener.ended["a"].failure
    assert failure is not None
    assert failure.code == "replica_died"
    assert failure.message == (
        "stage voice waited for the next chunk of the stream of stage thinker: "
        "stage thinker/0 is gone"
    )


async def test_a_kill_under_load_is_told_at_once() -> None:
    async with running() as client:
        for i in range(20):
            await client.add_request_async(say(f"r{i}", "!sleep=0.2 one two"))
        await client.get_outputs_async()
        waiting = asyncio.create_task(_read_for_ever(client))
        call = asyncio.create_task(client.call_utility_async("figures"))
        await asyncio.sleep(0)
        os.kill(pid_of(client), signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(EngineDeadError, match="stage voice/0 was killed by SIGKILL"):
            await waiting
        with pytest.raises(EngineDeadError):
            await call

        assert time.monotonic() - begin < 0.5
        with pytest.raises(EngineDeadError):
            client.check_health()
        with pytest.raises(EngineDeadError):
            await client.add_request_async(say("late", "one"))
        await client.abort_requests_async(["r1"])


async def _read_for_ever(client: OneShotClient) -> None:
    while True:
        await client.get_outputs_async()


async def test_a_replica_that_dies_in_a_forward_is_told_at_once() -> None:
    async with running() as client:
        await client.add_request_async(say("a", "!die"))
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await asyncio.wait_for(_read_for_ever(client), 5)


async def test_a_kill_within_a_report_leaves_those_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running() as client:
        monkeypatch.setattr(process_client, "MAX_UNREAD_OUTPUTS", 0)
        client._watch_reports()
        await client.add_request_async(say("a", f"one {'long' * 50_000}"))
        await eventually(lambda: _num_unread_bytes(client) > 100_000)
        os.kill(pid_of(client), signal.SIGKILL)
        monkeypatch.undo()
        listener = Listener(client)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await listener.until_ended("a")

    assert listener.pcm["a"] == spoken("one")


def _num_unread_bytes(client: OneShotClient) -> int:
    number = fcntl.ioctl(client._reports.fileno(), termios.FIONREAD, bytes(4))
    return int.from_bytes(number, sys.byteorder)


async def test_an_abort_makes_room_for_the_outputs_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running() as client:
        monkeypatch.setattr(process_client, "MAX_UNREAD_OUTPUTS", 1)
        await client.add_request_async(say("a", "one !sleep=0.2 more"))
        await eventually(lambda: not client._is_reading)
        await client.abort_requests_async(["a"])
        await client.add_request_async(say("b", "two"))
        listener = Listener(client)
        await listener.until_ended("b")

    assert listener.pcm == {"b": spoken("two")}


async def test_a_replica_whose_reports_are_none_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def receive() -> None:
        raise BrokenReportsError("noise")

    async with running() as client:
        monkeypatch.setattr(client._reports, "receive", receive)
        await client.add_request_async(say("a", "one"))
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await asyncio.wait_for(_read_for_ever(client), 5)


async def test_samples_of_megabytes_arrive() -> None:
    text = f"{'long' * 20_000} short"
    async with running() as client:
        listener = Listener(client)
        await client.add_request_async(say("a", text))
        await listener.until_ended("a")

    assert listener.pcm["a"] == spoken(text)


async def test_sigterm_ends_the_replica_and_its_requests() -> None:
    async with running() as client:
        listener = Listener(client)
        await client.add_request_async(listen("a", "s"))
        await client.call_utility_async("figures")
        os.kill(pid_of(client), signal.SIGTERM)
        with pytest.raises(EngineDeadError, match="exited with code 0"):
            await listener.until_ended("never")

    failure = listener.ended["a"].failure
    assert failure is not None
    assert failure.message == "stage voice was stopped"


@pytest.mark.parametrize("message", [b"", b"\xff" * 9, b"\x81\xa4type\xa3bad"])
async def test_an_unreadable_command_harms_nobody(message: bytes) -> None:
    async with running() as client:
        listener = Listener(client)
        client._commands.send(message)
        await client.add_request_async(say("a", "one"))
        await listener.until_ended("a")

    assert listener.pcm["a"] == spoken("one")


async def test_an_abort_stops_the_work_and_nothing_follows() -> None:
    async with running(max_batch_size=1) as client:
        listener = Listener(client)
        await client.add_request_async(say("a", "!sleep=0.05 " * 200))
        await client.add_request_async(say("b", "one " * 20))
        await listener.next()
        await client.abort_requests_async(["a", "unknown"])
        listener.pcm.pop("a", None)
        await listener.until_ended("b")
        figures = await client.call_utility_async("figures")

    assert isinstance(figures, dict)
    assert figures["num_requests"] == 0
    assert figures["num_forwards"] < 60
    assert listener.pcm == {"b": spoken("one " * 20)}


async def test_a_deadline_is_kept_by_the_replica() -> None:
    async with running() as client:
        listener = Listener(client)
        request = listen("a", "s")
        request.deadline_s = time.monotonic() + 0.2
        await client.add_request_async(request)
        await listener.until_ended("a")

    failure = listener.ended["a"].failure
    assert failure is not None
    assert failure.message.endswith(
        "waiting for the first chunk or the end of the stream of stage thinker"
    )


async def test_a_client_that_does_not_read_stops_the_forwards() -> None:
    text = "a " * 12_000
    async with running() as client:
        assert client._process is not None
        beats: asyncio.Queue[float] = asyncio.Queue(100)
        client._process.on_beat = lambda beat: beats.put_nowait(beat.figures["num_forwards"])
        await client.add_request_async(say("a", text))
        forwards = [0.0, await beats.get()]
        while forwards[-1] > forwards[-2] or forwards[-1] == 0:
            forwards.append(await beats.get())
        assert forwards[-1] < 12_000

        listener = Listener(client)
        await listener.until_ended("a")

    assert listener.pcm["a"] == spoken(text)


async def test_utilities_answer_refuse_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as client:
        assert await client.call_utility_async("is_sleeping") is False
        with pytest.raises(BadRequestError, match=r"stage voice \(one-shot\) has no 'sleep'"):
            await client.call_utility_async("sleep", 1)
        monkeypatch.setattr(process_client, "CALL_TIMEOUT_S", 0.2)
        os.kill(pid_of(client), signal.SIGSTOP)
        with pytest.raises(DeadlineExceededError, match=r"did not answer 'figures' in 0\.2 s"):
            await client.call_utility_async("figures")
        os.kill(pid_of(client), signal.SIGCONT)


async def test_what_a_one_shot_stage_does_not_take_is_refused() -> None:
    async with running() as client:
        await client.add_request_async(listen("a", "s"))
        for request in (
            listen("a", "t"),
            StageRequest("b", 2, "a plain string", None),
            StageRequest("b", 2, OmniPrompt(text="x"), {"voice": "default"}),
        ):
            with pytest.raises(BadRequestError):
                await client.add_request_async(request)


@pytest.mark.slow
@pytest.mark.alone
async def test_five_hundred_aborts_leave_nothing_behind(thinker: Connector) -> None:
    async with running() as client:
        await _abort_many(client, thinker, 100)
        before = _holdings(pid_of(client)), _holdings(os.getpid())
        await _abort_many(client, thinker, 500)
        after = _holdings(pid_of(client)), _holdings(os.getpid())

    for (rss_before, files_before), (rss_after, files_after) in zip(before, after, strict=True):
        assert files_after == files_before
        assert rss_after - rss_before < 4 * 1024 * 1024
    assert not os.listdir("/dev/shm")


async def _abort_many(client: OneShotClient, thinker: Connector, number: int) -> None:
    """Requests with a prompt and with a stream, aborted at different points of their lives."""
    payload = b"word " * 20_000  # through shared memory
    for i in range(number):
        stream = f"s{number}.{i}"
        await client.add_request_async(listen(f"l{i}", stream))
        await client.add_request_async(say(f"p{i}", "one two three"))
        thinker.sender.open(str(client.data_address), stream)
        thinker.sender.push(stream, payload if i % 3 == 0 else b"hello wor")
        if i % 2:
            await client.get_outputs_async()
        await client.abort_requests_async([f"l{i}", f"p{i}"])
        thinker.sender.end(stream, "abort")
    while (await client.call_utility_async("figures"))["num_requests"]:  # type: ignore[index]
        pass


def _holdings(pid: int) -> tuple[int, list[str]]:
    """Resident bytes, and open files by what they are."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    folder = Path(f"/proc/{pid}/fd")
    files = []
    for entry in folder.iterdir():
        try:
            files.append(os.readlink(entry).split(":")[0])
        except FileNotFoundError:
            continue
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE"), sorted(files)


@pytest.mark.slow
async def test_an_idle_replica_uses_no_cpu() -> None:
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    async with running() as client:
        await client.add_request_async(listen("parked", "s"))
        await client.call_utility_async("figures")
        before = _cpu_ticks(pid_of(client))
        await asyncio.sleep(10)  # what is measured is that nothing happens
        used_s = (_cpu_ticks(pid_of(client)) - before) / os.sysconf("SC_CLK_TCK")

    assert used_s <= 0.003 * 10


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


async def test_memory_that_runs_out_costs_the_requests_that_need_it() -> None:
    async with running() as client:
        listener = Listener(client)
        await client.add_request_async(say("big", "one !memory=0"))
        await client.add_request_async(say("small", "one two three"))
        await listener.until_ended("big", "small")
        client.check_health()

    failure = listener.ended["big"].failure
    assert failure is not None
    assert failure.code == "out_of_memory"
    small = listener.ended["small"].failure
    assert listener.pcm["small"] == spoken("one two three") if small is None else small == failure


async def test_a_device_without_memory_is_a_death() -> None:
    async with running() as client:
        await client.add_request_async(say("a", "!broken"))
        with pytest.raises(EngineDeadError, match="MemoryError: no room for 1"):
            await asyncio.wait_for(_read_for_ever(client), 5)
