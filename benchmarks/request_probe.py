"""Notes when requests pass the places on their way, in every process of a server.

What `first_audio` reads. A plugin of vLLM's that wraps methods of the server from outside, so that
it is loaded where the server's own is; only requests that are named by `NAME` are noted, each once
at a place, and what is noted is written beside the work.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

FOLDER: Final = "OMNI_PROBE_FOLDER"
"""Variable with the folder that every process writes a file into."""
NAME: Final = re.compile(r"probe\.\d+\.\d+\.\d+")
_FLUSH_S: Final = 0.1

_notes: list[tuple[int, str, str]] = []
_seen: set[tuple[str, str]] = set()
_lock = threading.Lock()


def note(place: str, *request_ids: object) -> None:
    """Note that requests are at a place now."""
    now = time.monotonic_ns()
    for request_id in request_ids:
        found = NAME.search(str(request_id))
        if found is not None and (place, found[0]) not in _seen:
            _seen.add((place, found[0]))
            _notes.append((now, place, found[0]))


def read_notes(folder: Path) -> Iterator[tuple[int, str, str]]:
    """Moment (nanoseconds of the monotonic clock), place and request of everything noted."""
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            now, place, name = json.loads(line)
            yield now, place, name


def install() -> None:
    """Wrap what this process has. The entry point of the plugin."""
    if FOLDER not in os.environ or _lock.locked():
        return
    _lock.acquire()  # once for each process
    threading.Thread(target=_flush_forever, name="probe", daemon=True).start()
    if multiprocessing.current_process().name == "MainProcess":
        _install_in_api()
    else:
        _install_in_core()


def run_one_shot(shell: Any, /, **kwargs: Any) -> None:
    """In the place of the one-shot replica's target, which loads no plugins of vLLM's."""
    from vllm_omni.generation.engine import OneShotEngine
    from vllm_omni.generation.proc import run_one_shot as target

    install()
    _wrap(OneShotEngine, "on_frame", lambda _, frame: note("code2wav: codes", frame.stream))
    _wrap(OneShotEngine, "_run", lambda _, batch: note("code2wav: begun", *_ids(batch)))
    _wrap(OneShotEngine, "step", None, lambda made: note("code2wav: audio", *_ids(made, "audio")))
    target(shell, **kwargs)


def _install_in_api() -> None:
    from vllm_omni.engine.ar_client import ArClient
    from vllm_omni.engine.one_shot_client import OneShotClient
    from vllm_omni.engine.queue_messages import ClientOutput
    from vllm_omni.entrypoints.openai.chat.serving import OmniServingChat
    from vllm_omni.entrypoints.output_collector import OutputRouter
    from vllm_omni.entrypoints.request_stream import RequestStreams

    OneShotClient.target = staticmethod(run_one_shot)

    def read(_: object, body: object, request: Any) -> None:
        note("api: body read", request.headers.get("x-request-id", ""))

    def deliver(_: object, message: ClientOutput) -> None:
        if message.output.has_content:
            kind = "text" if message.output.audio is None else "audio"
            note(f"api: {kind} back", message.request_id)

    _wrap(OmniServingChat, "create", read)
    _wrap(RequestStreams, "_stream", lambda _, prompt, name, wish: note("api: rendered", name))
    _wrap(
        ArClient,
        "add_request_async",
        lambda self, request: note(f"orchestrator: to {_stage(self.name)}", request.request_id),
    )
    _wrap(OutputRouter, "_deliver", deliver)


def _install_in_core() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    from vllm_omni.core.conditioned_core import ConditionedCore
    from vllm_omni.core.stage_core import StageCore

    stage = _stage(multiprocessing.current_process().name)

    def written(_: object, outputs: dict[int, Any] | None) -> None:
        for one in (outputs or {}).values():
            note(f"{stage}: written", *_ids(one.outputs, "new_token_ids"))

    _wrap(
        StageCore, "add_request", lambda _, request, *__: note(f"{stage}: there", *_ids([request]))
    )
    _wrap(
        ConditionedCore, "_begin", lambda _, request, *__: note(f"{stage}: fed", *_ids([request]))
    )
    _wrap(
        Scheduler,
        "schedule",
        None,
        lambda made: note(f"{stage}: begun", *made.num_scheduled_tokens),
    )
    _wrap(StageCore, "_push", written)


def _wrap(
    owner: type,
    name: str,
    before: Callable[..., None] | None,
    after: Callable[[Any], None] | None = None,
) -> None:
    method = getattr(owner, name)

    @functools.wraps(method)
    def wrapped(self: object, *args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(self, *args, **kwargs)
        result = method(self, *args, **kwargs)
        if after is not None:
            after(result)
        return result

    setattr(owner, name, wrapped)


def _ids(items: Iterable[Any], having: str | None = None) -> list[str]:
    return [item.request_id for item in items if having is None or getattr(item, having)]


def _stage(replica: str) -> str:
    return replica.partition("/")[0]


def _flush_forever() -> None:
    path = Path(os.environ[FOLDER]) / str(os.getpid())
    with path.open("a", buffering=1) as file:
        while True:
            time.sleep(_FLUSH_S)
            while _notes:
                file.write(json.dumps(_notes.pop(0)) + "\n")
