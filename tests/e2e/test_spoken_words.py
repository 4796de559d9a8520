"""The demo model says what it writes: another recogniser hears the same words."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr

from benchmarks.demo import audio_data
from benchmarks.served import Server, serve
from tests.demo_model import demo_model_dir
from vllm_omni.model_executor.models.smol_voice.assemble import find_sources

pytestmark = [pytest.mark.slow, pytest.mark.weights, pytest.mark.timeout(600)]

MAX_WORD_ERROR_RATE = 0.15
SENTENCES = (
    "The capital of France is Paris, and the river that runs through it is the Seine.",
    "Good morning, how can I help you today?",
    "Please remember to bring your umbrella, because it might rain this afternoon.",
    "She bought fresh bread, butter, and a dozen eggs at the market.",
    "The train to the city leaves from platform seven in twenty minutes.",
    "Water is made of hydrogen and oxygen.",
    "If you want to learn a language, practice it every single day!",
    "Doctor Smith told us that the meeting was moved to the following Thursday.",
    "My brother plays the guitar, but he would rather be a painter.",
    "Thank you very much for your help. I hope to see you again soon.",
)

TOOLS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "weather of a city",
        "strict": True,  # else vLLM leaves the arguments free, and so small a model writes none
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"type": "string", "enum": ["C", "F"]},
            },
            "required": ["city", "unit"],
        },
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("served") / "server.log"
    with serve(demo_model_dir(), log, TOOLS) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: Any) -> str:
    name: str = client.models.list().data[0].id
    return name


class Recogniser:
    """faster-whisper with its own copy of the weights: nothing of ours is in its path."""

    def __init__(self, model_dir: Path) -> None:
        from faster_whisper import WhisperModel

        self._model = WhisperModel(str(model_dir), device="cpu", compute_type="float32")

    def __call__(self, samples: np.ndarray, rate_hz: int) -> str:
        heard, _ = self._model.transcribe(
            soxr.resample(samples, rate_hz, 16_000), language="en", beam_size=5
        )
        return "".join(segment.text for segment in heard)


@pytest.fixture(scope="module")
def recogniser() -> Recogniser:
    pytest.importorskip("faster_whisper")
    return Recogniser(find_sources()["asr"] / "model")


def word_error_rate(written: list[str], heard: list[str]) -> float:
    """Over all texts together; case and punctuation do not count."""
    import jiwer

    normal = jiwer.Compose(
        [
            jiwer.ToLowerCase(),
            jiwer.SubstituteRegexes({"-": " "}),
            jiwer.RemovePunctuation(),
            jiwer.RemoveMultipleSpaces(),
            jiwer.Strip(),
            jiwer.ReduceToListOfListOfWords(),
        ]
    )
    rate: float = jiwer.wer(written, heard, reference_transform=normal, hypothesis_transform=normal)
    return rate


def test_the_measure_notices_wrong_words() -> None:
    assert word_error_rate(["Hello, my friend."], ["hello my friend"]) == 0.0
    assert word_error_rate(["one two three four"], ["one two four"]) == 0.25


def test_ten_sentences_are_understood(client: Any, model: str, recogniser: Recogniser) -> None:
    heard = []
    for sentence in SENTENCES:
        sound = client.audio.speech.create(
            model=model, voice="default", input=sentence, response_format="wav"
        ).content
        heard.append(recogniser(*soundfile.read(io.BytesIO(sound), dtype="float32")))

    rate = word_error_rate(list(SENTENCES), heard)

    assert rate <= MAX_WORD_ERROR_RATE, list(zip(SENTENCES, heard, strict=True))


def test_a_streamed_answer_is_heard_as_it_is_written(
    client: Any, model: str, recogniser: Recogniser
) -> None:
    text, pcm = "", b""
    for chunk in client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is water made of?"}],
        modalities=["text", "audio"],
        audio={"voice": "default", "format": "pcm16"},
        max_completion_tokens=80,
        temperature=0.0,
        stream=True,
    ):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            pcm += audio_data(choice.delta)

    samples = np.frombuffer(pcm, dtype="<i2").astype(np.float32) / 32768.0
    heard = recogniser(samples, 22_050)

    assert len(text.split()) > 10
    assert word_error_rate([text], [heard]) <= MAX_WORD_ERROR_RATE, (text, heard)


def test_a_spoken_question_is_answered(client: Any, model: str) -> None:
    sound = client.audio.speech.create(
        model=model, voice="default", input="What is the capital of France?", response_format="wav"
    ).content
    recording = {"data": base64.b64encode(sound).decode(), "format": "wav"}

    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": [{"type": "input_audio", "input_audio": recording}]}],
        max_completion_tokens=40,
        temperature=0.0,
    )

    assert "Paris" in answer.choices[0].message.content


def test_our_recogniser_agrees_with_the_independent_one(
    client: Any, model: str, recogniser: Recogniser
) -> None:
    sentence = SENTENCES[0]
    sound = client.audio.speech.create(
        model=model, voice="default", input=sentence, response_format="wav"
    ).content
    ours = client.audio.transcriptions.create(model=model, file=("a.wav", sound)).text
    theirs = recogniser(*soundfile.read(io.BytesIO(sound), dtype="float32"))

    assert word_error_rate([theirs], [ours]) <= MAX_WORD_ERROR_RATE, (theirs, ours)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_tool_is_called_as_in_vllm(client: Any, model: str, choice: Any) -> None:
    asked = {
        "model": model,
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [WEATHER],
        "tool_choice": choice,
        "temperature": 0,
        "max_tokens": 80,
    }
    (call,) = client.chat.completions.create(**asked).choices[0].message.tool_calls
    name = arguments = ""
    for event in client.chat.completions.create(**asked, stream=True):
        for delta in (event.choices[0].delta.tool_calls or []) if event.choices else []:
            name += delta.function.name or ""
            arguments += delta.function.arguments or ""

    assert (call.function.name, name) == ("get_weather", "get_weather")
    whole = json.loads(call.function.arguments)
    assert set(whole) == {"city", "unit"}
    assert json.loads(arguments) == whole
