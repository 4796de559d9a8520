"""Requests of every kind over HTTP, and what became of each: status, code, times of its chunks."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
import wave
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

_LAST_EVENTS: Final = ("speech.audio.done", "image_generation.completed")
SENTENCE: Final = "The small clock ticks again. "
"""Long enough to be said by itself."""


@dataclass(slots=True)
class Outcome:
    """One request, as its client saw it."""

    kind: str
    started_s: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0
    status: int = 0
    """0: the connection failed before an answer."""
    code: str = ""
    """Of the error, in the body or in the stream."""
    message: str = ""
    chunk_times_s: list[float] = field(default_factory=list)
    num_previews: int = 0
    """Pictures of a picture that was not done."""
    is_complete: bool = False
    """The answer came to its end."""
    left: bool = False
    """The client went away on purpose."""
    body: Any = None
    """Of an answer in one piece."""

    @property
    def duration_s(self) -> float:
        return self.ended_s - self.started_s

    @property
    def succeeded(self) -> bool:
        return self.status == 200 and self.is_complete and not self.code

    def longest_gap_s(self, from_s: float, to_s: float) -> float:
        """The longest time without a chunk between two moments of the stream."""
        inside = [t for t in self.chunk_times_s if from_s <= t <= to_s]
        if not inside:
            return to_s - from_s
        borders = [max(from_s, self.started_s), *inside]
        return max(after - before for before, after in zip(borders, inside, strict=False))

    def chunks_between(self, from_s: float, to_s: float) -> int:
        return sum(from_s <= t < to_s for t in self.chunk_times_s)

    def __str__(self) -> str:
        said = f" {self.code}: {self.message[:160]}" if self.code or self.message else ""
        return (
            f"{self.kind}: {self.status}{'' if self.is_complete else ' incomplete'}{said} "
            f"after {self.duration_s:.2f} s and {len(self.chunk_times_s)} chunks"
        )


class LoadClient:
    """Sends requests to one server. Made by `connected`."""

    def __init__(self, session: aiohttp.ClientSession, model: str) -> None:
        self._session = session
        self.model = model
        self.num_open = 0
        self.on_chunk: asyncio.Event = asyncio.Event()
        """Set whenever a chunk or an end arrived; who waits for one clears it."""

    async def get(self, path: str, timeout_s: float = 5.0) -> tuple[int, Any]:
        """Status and JSON of a route that answers at once."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._session.get(path, timeout=timeout) as response:
            text = await response.text()
        try:
            return response.status, json.loads(text)
        except ValueError:
            return response.status, text

    async def speech(
        self,
        text: str,
        *,
        seed: int | None = None,
        leave_after: int = 0,
        into: Outcome | None = None,
    ) -> Outcome:
        """Say a text, streamed as events."""
        body = {"input": text, "response_format": "pcm", "stream_format": "sse", "seed": seed}
        return await self._stream("/v1/audio/speech", body, into or Outcome("speech"), leave_after)

    async def chat(
        self,
        content: object,
        *,
        max_tokens: int = 32,
        seed: int | None = None,
        audio: bool = False,
        leave_after: int = 0,
        into: Outcome | None = None,
        **fields: object,
    ) -> Outcome:
        """A streamed chat, spoken too with `audio`. It writes all its tokens: random weights
        end anywhere."""
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "seed": seed,
            "ignore_eos": True,
            "stream": True,
            **fields,
        }
        if audio:
            body |= {
                "modalities": ["text", "audio"],
                "audio": {"voice": "default", "format": "pcm16"},
            }
        outcome = into or Outcome("chat with audio" if audio else "chat")
        return await self._stream("/v1/chat/completions", body, outcome, leave_after)

    async def transcribe(
        self,
        recording: bytes,
        *,
        max_tokens: int = 400,
        seed: int | None = None,
        into: Outcome | None = None,
    ) -> Outcome:
        """Write a recording down, streamed."""
        form = aiohttp.FormData()
        form.add_field("file", recording, filename="a.wav", content_type="audio/wav")
        fields = {"model": self.model, "stream": "true", "temperature": "0"}
        fields["max_completion_tokens"] = str(max_tokens)
        if seed is not None:
            fields["seed"] = str(seed)
        for name, value in fields.items():
            form.add_field(name, value)
        outcome = into or Outcome("transcription")
        return await self._run("/v1/audio/transcriptions", {"data": form}, outcome, 0)

    async def picture(
        self,
        prompt: str,
        *,
        steps: int = 20,
        size: str = "64x64",
        seed: int | None = None,
        previews: int = 0,
        leave_after: int = 0,
        into: Outcome | None = None,
    ) -> Outcome:
        """Paint a picture, streamed: each step is a chunk, and so is each preview."""
        body = {
            "prompt": prompt,
            "num_inference_steps": steps,
            "size": size,
            "seed": seed,
            "stream": True,
            "partial_images": previews or None,
        }
        outcome = into or Outcome("picture")
        return await self._stream("/v1/images/generations", body, outcome, leave_after)

    async def post(self, path: str, body: Mapping[str, object]) -> Outcome:
        """A request that is answered in one piece."""
        return await self._run(path, {"json": {"model": self.model, **body}}, Outcome(path), 0)

    async def _stream(
        self, path: str, body: dict[str, Any], outcome: Outcome, leave_after: int
    ) -> Outcome:
        given = {name: value for name, value in body.items() if value is not None}
        return await self._run(path, {"json": {"model": self.model, **given}}, outcome, leave_after)

    async def _run(
        self, path: str, content: dict[str, Any], outcome: Outcome, leave_after: int
    ) -> Outcome:
        outcome.started_s = time.monotonic()
        self.num_open += 1
        try:
            async with self._session.post(path, **content) as response:
                outcome.status = response.status
                if response.content_type == "text/event-stream":
                    await self._read_events(response, outcome, leave_after)
                else:
                    _take_body(await response.read(), outcome)
        except (aiohttp.ClientError, ConnectionError) as error:
            outcome.message = outcome.message or repr(error)
        finally:
            self.num_open -= 1
            outcome.ended_s = time.monotonic()
            self.on_chunk.set()
        return outcome

    async def _read_events(
        self, response: aiohttp.ClientResponse, outcome: Outcome, leave_after: int
    ) -> None:
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            _take_event(line[6:].strip(), outcome)
            self.on_chunk.set()
            if leave_after and len(outcome.chunk_times_s) >= leave_after:
                outcome.left = True
                response.close()
                return


@asynccontextmanager
async def connected(
    url: str, model: str = "", timeout_s: float = 120.0
) -> AsyncIterator[LoadClient]:
    """A client of the server at `url`; without a model, of the one that it serves."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    limit = 1 << 24  # bytes of one event
    async with aiohttp.ClientSession(
        url, timeout=timeout, connector=connector, read_bufsize=limit
    ) as session:
        client = LoadClient(session, model)
        if not model:
            _, models = await client.get("/v1/models", 30.0)
            client.model = models["data"][0]["id"]
        yield client


def _take_event(data: bytes, outcome: Outcome) -> None:
    if data == b"[DONE]":
        outcome.is_complete = True
        return
    event = json.loads(data)
    if "error" in event:
        _take_error(event, outcome)
        return
    if event.get("type") in _LAST_EVENTS:
        outcome.is_complete = True
        return
    if event.get("type") == "image_generation.partial_image":
        outcome.num_previews += 1
    outcome.chunk_times_s.append(time.monotonic())


def _take_body(data: bytes, outcome: Outcome) -> None:
    try:
        outcome.body = json.loads(data)
    except ValueError:
        outcome.body = data
    if isinstance(outcome.body, dict) and "error" in outcome.body:
        _take_error(outcome.body, outcome)
        return
    outcome.is_complete = True


def _take_error(body: Mapping[str, Any], outcome: Outcome) -> None:
    error = body["error"]
    outcome.code = str(error.get("code") or "(no code)")
    outcome.message = str(error.get("message", ""))


def recording(seconds: float = 1.0, rate_hz: int = 16_000) -> bytes:
    """A WAV file with a buzz in it."""
    num_samples = round(seconds * rate_hz)
    samples = b"".join(
        (8000 if i // 40 % 2 else -8000).to_bytes(2, "little", signed=True)
        for i in range(num_samples)
    )
    file = io.BytesIO()
    with wave.open(file, "wb") as wav:
        wav.setnchannels(1)
        wav.setsampwidth(2)
        wav.setframerate(rate_hz)
        wav.writeframes(samples)
    return file.getvalue()


def heard(wav: bytes, text: str = "What is this?") -> list[dict[str, object]]:
    """Content of a chat message with a recording."""
    audio = {"data": base64.b64encode(wav).decode(), "format": "wav"}
    return [{"type": "text", "text": text}, {"type": "input_audio", "input_audio": audio}]
