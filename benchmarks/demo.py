"""The demo: serve the model, ask it a question in text and one by voice, write what it says.

Writes answer.txt, answer.wav (both answers, in order) and timings.json, prints them, and leaves no
process behind. `--repeat N` asks the first question N times more and adds medians.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import signal
import statistics
import sys
import time
import wave
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from openai import OpenAI, OpenAIError
from tqdm import tqdm

from benchmarks.served import Server, ServerError, serve

TEXT_QUESTION: Final = "What is the capital of France?"
SPOKEN_QUESTION: Final = "What is water made of?"
MAX_TOKENS: Final = 120
PAUSE_S: Final = 0.5


@dataclass
class Answer:
    """One streamed answer with the moments its parts came, in seconds since the request."""

    question: str
    text: str = ""
    pcm: bytearray = field(default_factory=bytearray)
    first_text_s: float | None = None
    first_audio_s: float | None = None
    total_s: float = 0.0
    rate_hz: int = 0

    @property
    def audio_s(self) -> float:
        return len(self.pcm) / 2 / self.rate_hz

    def timings(self) -> dict[str, Any]:
        return {
            "question": self.question,
            "answer": self.text.strip(),
            "first_text_s": _rounded(self.first_text_s),
            "first_audio_s": _rounded(self.first_audio_s),
            "total_s": _rounded(self.total_s),
            "audio_s": _rounded(self.audio_s),
            "real_time_factor": _rounded(self.total_s / self.audio_s) if self.audio_s else None,
        }


def ask(client: OpenAI, model: str, question: str, content: object, rate_hz: int) -> Answer:
    """Ask for text and speech, streamed."""
    answer = Answer(question, rate_hz=rate_hz)
    started_s = time.monotonic()
    stream: Any = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": content}],  # type: ignore[misc,list-item]
        modalities=["text", "audio"],
        audio={"voice": "default", "format": "pcm16"},
        max_completion_tokens=MAX_TOKENS,
        temperature=0.0,
        stream=True,
    )
    for chunk in stream:
        now_s = time.monotonic() - started_s
        for choice in chunk.choices:
            if choice.delta.content:
                answer.text += choice.delta.content
                answer.first_text_s = answer.first_text_s or now_s
            if data := audio_data(choice.delta):
                answer.pcm += data
                answer.first_audio_s = answer.first_audio_s or now_s
    answer.total_s = time.monotonic() - started_s
    return answer


def audio_data(delta: Any) -> bytes:
    """New samples of a streamed answer; older clients know `audio` as a dict only."""
    audio = getattr(delta, "audio", None)
    encoded = audio.get("data") if isinstance(audio, dict) else getattr(audio, "data", None)
    return base64.b64decode(encoded or "")


def run_demo(server: Server, repeat: int) -> tuple[list[Answer], dict[str, Any]]:
    """Ask both questions, and the first one `repeat` times more."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300.0, max_retries=0)
    model = client.models.list().data[0].id
    steps = tqdm(total=3 + repeat, desc="asking", bar_format="{desc:<28}{bar}| {elapsed}")
    with steps, client:
        spoken = client.audio.speech.create(
            model=model, voice="default", input=SPOKEN_QUESTION, response_format="wav"
        ).content
        rate_hz = _wav_rate_hz(spoken)
        steps.update()
        sound = {"data": base64.b64encode(spoken).decode(), "format": "wav"}
        by_voice = [{"type": "input_audio", "input_audio": sound}]
        answers = [ask(client, model, TEXT_QUESTION, TEXT_QUESTION, rate_hz)]
        steps.update()
        answers.append(ask(client, model, f"{SPOKEN_QUESTION} (spoken)", by_voice, rate_hz))
        steps.update()
        again = []
        for _ in range(repeat):
            again.append(ask(client, model, TEXT_QUESTION, TEXT_QUESTION, rate_hz))
            steps.update()
    timings = {
        "ready_s": _rounded(server.ready_s),
        "answers": [answer.timings() for answer in answers],
        "stages": stage_timings(server),
        "memory_gib": round(server.memory_bytes() / 2**30, 2),
    }
    if again:
        timings["repeated"] = medians(again)
    return answers, timings


def medians(answers: list[Answer]) -> dict[str, Any]:
    rows = [answer.timings() for answer in answers]
    names = ("first_text_s", "first_audio_s", "total_s", "real_time_factor")
    found = {name: [row[name] for row in rows if row[name] is not None] for name in names}
    return {"num": len(rows)} | {
        f"{name}_p50": _rounded(statistics.median(values))
        for name, values in found.items()
        if values
    }


def stage_timings(server: Server) -> dict[str, Any]:
    """Mean time to the first output and over all, per stage, from the server's own metrics."""
    from prometheus_client.parser import text_string_to_metric_families

    sums: dict[tuple[str, str], dict[str, float]] = {}
    for family in text_string_to_metric_families(server.get("/metrics").decode()):
        if not family.name.startswith("vllm_omni") or family.type != "histogram":
            continue
        for sample in family.samples:
            part = sample.name.removeprefix(family.name)
            if part in ("_sum", "_count") and "stage" in sample.labels:
                sums.setdefault((sample.labels["stage"], family.name), {})[part] = sample.value
    stages: dict[str, Any] = {}
    for (stage, name), parts in sums.items():
        if count := parts.get("_count"):
            short = name.removeprefix("vllm_omni_")
            mean = _rounded(parts["_sum"] / count)
            stages.setdefault(stage, {})[f"{short}_mean"] = mean
    return stages


def write(out_dir: Path, answers: list[Answer], timings: dict[str, Any]) -> None:
    (out_dir / "answer.txt").write_text("".join(f"{a.text.strip()}\n" for a in answers))
    (out_dir / "timings.json").write_text(json.dumps(timings, indent=2) + "\n")
    rate_hz = answers[0].rate_hz
    with wave.open(str(out_dir / "answer.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate_hz)
        pause = bytes(2 * round(PAUSE_S * rate_hz))
        file.writeframes(pause.join(bytes(answer.pcm) for answer in answers))


def show(out_dir: Path, timings: dict[str, Any]) -> None:
    for row in timings["answers"]:
        print(f"\nQ: {row['question']}\nA: {row['answer']}")
        print(
            f"   first text {row['first_text_s']} s, first audio {row['first_audio_s']} s, "
            f"all {row['total_s']} s for {row['audio_s']} s of speech "
            f"(real-time factor {row['real_time_factor']})"
        )
    print(f"\nready in {timings['ready_s']} s, {timings['memory_gib']} GiB in all processes")
    for stage, figures in timings["stages"].items():
        print(f"   {stage}: " + ", ".join(f"{name} {value}" for name, value in figures.items()))
    if "repeated" in timings:
        print("   repeated: " + json.dumps(timings["repeated"]))
    print(f"\nwritten: {out_dir}/answer.txt, {out_dir}/answer.wav, {out_dir}/timings.json")


def _wav_rate_hz(data: bytes) -> int:
    with wave.open(io.BytesIO(data)) as file:
        return file.getframerate()


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path(".demo/smol_voice"))
    parser.add_argument("--out", type=Path, default=Path("demo_out"))
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--repeat", type=int, default=0)
    parser.add_argument("--timeout-s", type=float, default=300.0, help="to become ready")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    arguments, server_arguments = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    arguments.out.mkdir(parents=True, exist_ok=True)
    log = arguments.out / "server.log"
    served = serve(
        arguments.model, log, server_arguments, port=arguments.port, timeout_s=arguments.timeout_s
    )
    try:
        with served as server:
            answers, timings = run_demo(server, arguments.repeat)
    except (ServerError, OpenAIError) as error:
        print(f"demo: {error}\nthe server's log: {log}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted; the server is stopped", file=sys.stderr)
        return 130
    write(arguments.out, answers, timings)
    show(arguments.out, timings)
    if arguments.json:
        print(json.dumps(timings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
