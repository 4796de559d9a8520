"""Encoders: pieces join to one valid file, whatever the pieces were."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest
import soundfile

from vllm_omni.entrypoints.openai.media.encode import (
    CHAT_FORMATS,
    FORMATS,
    SPEECH_FORMATS,
    encode_file,
    encode_stream,
    find_format,
)
from vllm_omni.entrypoints.openai.media.pool import MediaPool
from vllm_omni.errors import BadRequestError
from vllm_omni.outputs.media import AudioChunk

RATE = 22050
PCM = (np.sin(np.arange(RATE) * (2 * np.pi * 440 / RATE)) * 12000).astype("<i2").tobytes()


def pieces(form: str, size: int) -> list[bytes]:
    encoder = FORMATS[form].encoder()
    made = [
        encoder.encode(AudioChunk(PCM[at : at + size], RATE)) for at in range(0, len(PCM), size)
    ]
    return [*made, encoder.finish()]


@pytest.mark.parametrize("form", sorted(FORMATS))
@pytest.mark.parametrize("size", [2000, 4096, len(PCM)])
def test_pieces_decode_to_one_second(form: str, size: int) -> None:
    data = b"".join(pieces(form, size))
    if form in ("pcm", "pcm16"):
        assert data == PCM
        return
    with av.open(io.BytesIO(data)) as container:
        num_samples = sum(frame.samples for frame in container.decode(audio=0))
        assert num_samples / container.streams.audio[0].rate == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("form", ["mp3", "flac", "opus", "aac", "wav", "pcm"])
def test_pieces_come_out_while_there_are_more(form: str) -> None:
    made = pieces(form, 4410)

    # An encoder holds at most a few frames back: half of the file is out at half of the time.
    assert sum(map(len, made[:7])) > 0.3 * sum(map(len, made))


@pytest.mark.parametrize("form", ["wav", "flac"])
def test_a_whole_file_knows_its_length(form: str) -> None:
    data = encode_file(FORMATS[form], AudioChunk(PCM, RATE))

    samples, rate = soundfile.read(io.BytesIO(data), dtype="int16")
    assert (samples.tobytes(), rate) == (PCM, RATE)


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_no_samples_are_no_error(form: str) -> None:
    empty = encode_file(FORMATS[form], None)
    streamed = FORMATS[form].encoder().finish()

    assert len(empty) == len(streamed) == (44 if form == "wav" else 0)


def test_the_wav_header_comes_once() -> None:
    data = b"".join(pieces("wav", 2000))

    assert data.count(b"RIFF") == 1
    assert data[44:] == PCM


async def test_a_stream_closes_what_feeds_it() -> None:
    closed = []

    async def chunks():  # type: ignore[no-untyped-def]
        try:
            yield AudioChunk(PCM, RATE)
            yield AudioChunk(PCM, RATE)
        finally:
            closed.append(True)

    pool = MediaPool()
    stream = encode_stream(chunks(), FORMATS["mp3"], pool)
    assert await anext(stream)
    await stream.aclose()
    pool.close()
    assert closed


@pytest.mark.parametrize("allowed", [CHAT_FORMATS, SPEECH_FORMATS])
def test_an_unknown_format_is_refused_with_the_list(allowed: tuple[str, ...]) -> None:
    with pytest.raises(BadRequestError, match=", ".join(allowed)) as error:
        find_format("midi", allowed, "audio.format")
    assert error.value.field == "audio.format"
