"""Closed loop of spoken chats against a running server: when sound begins, and whether it stops.

    spoken_chat.py --url http://127.0.0.1:8000 --model M --load 100:100:200 -c 1,8,32 -n 6,24,64

A load is PROMPT_TOKENS:TEXT_TOKENS:FRAMES; 0 frames ask for text alone. Lengths are fixed: stages
ignore their ends. Each client asks again when its answer is complete. A play-back starves when a
chunk comes after all sound before it was played. Times are those at which an event was read here.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

SAMPLE_RATE_HZ: Final = 24_000
_WORDS: Final = ("time", "year", "people", "way", "day", "man", "thing", "life", "child", "world")
_TEMPLATE_TOKENS: Final = 9


@dataclass(frozen=True, slots=True)
class Load:
    """Lengths of a request, in tokens and frames."""

    prompt: int
    text: int
    frames: int

    @classmethod
    def parse(cls, text: str) -> Load:
        """`100:100:200`."""
        return cls(*map(int, text.split(":")))

    def body(self, model: str, seed: int) -> dict[str, Any]:
        """A chat request; another prompt for each seed."""
        words = random.Random(seed).choices(_WORDS, k=max(1, self.prompt - _TEMPLATE_TOKENS))
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": " ".join(words)}],
            "stream": True,
            "temperature": 0,
            "ignore_eos": True,
            "max_tokens": self.text,
            "modalities": ["text", "audio"] if self.frames else ["text"],
        }
        if self.frames:
            talker = {"max_tokens": self.frames, "ignore_eos": True}
            body |= {"audio": {"format": "pcm16"}, "sampling_params_list": [None, talker, None]}
        return body


@dataclass(slots=True)
class Answer:
    """What one client saw, in seconds after its request."""

    first_text_s: float | None = None
    chunks: list[tuple[float, float]] = field(default_factory=list)
    """When a chunk of sound came, and how long it is."""
    end_s: float = 0.0

    @property
    def sound_s(self) -> float:
        return sum(length_s for _, length_s in self.chunks)

    @property
    def starved_s(self) -> float:
        """The longest wait for a chunk after everything before it was played."""
        longest_s = played_s = 0.0
        for at_s, length_s in self.chunks:
            longest_s = max(longest_s, at_s - self.chunks[0][0] - played_s)
            played_s += length_s
        return longest_s


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """One request. Raises RuntimeError for an error of the server's."""
    answer, began_s = Answer(), time.perf_counter()
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            now_s = time.perf_counter() - began_s
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("error"):
                raise RuntimeError(str(event["error"])[:300])
            for choice in event["choices"]:
                delta = choice["delta"]
                if delta.get("content") and answer.first_text_s is None:
                    answer.first_text_s = now_s
                if data := (delta.get("audio") or {}).get("data"):
                    num_samples = len(base64.b64decode(data)) // 2
                    answer.chunks.append((now_s, num_samples / SAMPLE_RATE_HZ))
    answer.end_s = time.perf_counter() - began_s
    return answer


async def measure(
    url: str, model: str, load: Load, num_clients: int, num_requests: int
) -> dict[str, float]:
    """One load at one number of clients; each client warms up with a short answer first."""
    short = Load(load.prompt, min(load.text, 20), min(load.frames, 20))

    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None),
        connector=aiohttp.TCPConnector(limit=0),
        read_bufsize=1 << 20,
    ) as session:

        async def client(seeds: Iterator[int]) -> list[Answer]:
            return [await ask(session, url, load.body(model, seed)) for seed in seeds]

        await asyncio.gather(
            *(ask(session, url, short.body(model, -i)) for i in range(1, num_clients + 1))
        )
        began_s, seeds = time.perf_counter(), iter(range(num_requests))
        clients = await asyncio.gather(*(client(seeds) for _ in range(num_clients)))
    wall_s = time.perf_counter() - began_s
    return summary([answer for answers in clients for answer in answers], num_clients, wall_s)


def summary(answers: Sequence[Answer], num_clients: int, wall_s: float) -> dict[str, float]:
    """Medians, and the worst play-back."""
    texts_s = [a.first_text_s for a in answers if a.first_text_s is not None]
    spoken = [answer for answer in answers if answer.chunks]
    row = {"clients": num_clients, "requests_per_s": len(answers) / wall_s}
    if texts_s:  # random weights may write nothing that is text
        row["first_text_ms"] = 1e3 * statistics.median(texts_s)
    if spoken:
        row |= {
            "first_audio_ms": 1e3 * statistics.median(a.chunks[0][0] for a in spoken),
            "real_time_factor": statistics.median(a.end_s / a.sound_s for a in spoken),
            "starved_requests": sum(a.starved_s > 0 for a in spoken),
            "starved_s_max": max(a.starved_s for a in spoken),
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True)
    parser.add_argument("--load", action="append", required=True, type=Load.parse)
    parser.add_argument("-c", "--clients", default="1")
    parser.add_argument("-n", "--requests", default="4")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    levels = list(zip(args.clients.split(","), args.requests.split(","), strict=True))
    rows = []
    for load in args.load:
        for clients, requests in levels:
            row = asyncio.run(measure(args.url, args.model, load, int(clients), int(requests)))
            print(load, " ".join(f"{name}={value:.4g}" for name, value in row.items()), flush=True)
            rows.append({"load": [load.prompt, load.text, load.frames], **row})
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
