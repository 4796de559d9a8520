"""What a client's audio file may be: bounded, whole, finite, and what it says it is."""

from __future__ import annotations

import io
import struct

import av
import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from vllm_omni.entrypoints.openai.media.decode import AudioLimits, decode_audio, sniff
from vllm_omni.entrypoints.openai.media.encode import FORMATS, encode_file
from vllm_omni.entrypoints.openai.media.sources import EncodedMedia
from vllm_omni.entrypoints.openai.media.wav import missing_bytes, wav_header
from vllm_omni.errors import BadRequestError
from vllm_omni.inputs.prompt import AudioInput
from vllm_omni.outputs.media import AudioChunk

RATE = 16000
LIMITS = AudioLimits(max_bytes=10_000_000, max_s=2.0)
FIELD = "messages[0].content[1].input_audio.data"


def tone(num_samples: int = RATE) -> NDArray[np.float32]:
    wave = 0.5 * np.sin(np.arange(num_samples) * (2 * np.pi * 440 / RATE))
    return wave.astype(np.float32)


def written(samples: NDArray[np.float32], form: str = "WAV", subtype: str = "FLOAT") -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, RATE, format=form, subtype=subtype)
    return buffer.getvalue()


def decode(data: bytes, declared: str | None = None) -> AudioInput:
    return decode_audio(EncodedMedia(data, FIELD, declared), LIMITS)


def m4a(samples: NDArray[np.float32]) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=RATE, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
        frame.sample_rate = RATE
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return buffer.getvalue()


def test_wav_samples_come_through_exactly() -> None:
    audio = decode(written(tone()), "wav")

    assert audio.sample_rate_hz == RATE
    assert np.array_equal(audio.samples, tone())
    assert audio.samples.dtype == np.float32


@pytest.mark.parametrize("form", ["mp3", "flac", "opus", "aac"])
def test_our_own_answers_can_be_sent_back(form: str) -> None:
    pcm = (tone() * 32767).astype("<i2").tobytes()
    audio = decode(encode_file(FORMATS[form], AudioChunk(pcm, RATE)), form)

    assert audio.samples.size / audio.sample_rate_hz == pytest.approx(1.0, abs=0.15)
    assert float(np.abs(audio.samples).max()) == pytest.approx(0.5, abs=0.1)


def test_streamed_headers_of_unknown_length_are_read() -> None:
    pcm = (tone() * 32767).astype("<i2").tobytes()
    assert decode(wav_header(RATE, None) + pcm, "wav").samples.size == RATE

    encoder = FORMATS["flac"].encoder()
    flac = encoder.encode(AudioChunk(pcm, RATE)) + encoder.finish()
    assert decode(flac, "flac").samples.size == RATE


def test_m4a_is_read() -> None:
    audio = decode(m4a(tone()), "m4a")

    assert audio.samples.size / audio.sample_rate_hz == pytest.approx(1.0, abs=0.15)


def test_channels_are_mixed() -> None:
    stereo = np.stack([tone(), -tone()], axis=1)

    assert np.abs(decode(written(stereo)).samples).max() < 1e-6


def test_samples_over_full_scale_are_clipped() -> None:
    assert decode(written(4 * tone())).samples.max() == 1.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_samples_that_are_no_numbers_are_refused(bad: float) -> None:
    samples = tone()
    samples[7] = bad

    with pytest.raises(BadRequestError, match="not numbers") as error:
        decode(written(samples))
    assert error.value.field == FIELD


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no audio"),
        (b"hello", "no audio"),
        (b"RIFF\0\0\0\0WAVE", "cannot be decoded"),
        (written(tone())[:20], "cut off|cannot be decoded"),
        (written(tone())[:-100], "cut off"),
        (written(np.zeros(0, np.float32)), "empty"),
        (b"fLaC" + bytes(100), "cannot be decoded"),
        (b"OggS" + bytes(100), "cannot be decoded"),
        (b"ID3" + bytes(100), "cannot be decoded"),
        (b"\xff\xf1" + bytes(100), "cannot be decoded|empty"),
        (b"\x1aE\xdf\xa3" + bytes(100), "cannot be decoded"),
        (b"\0\0\0\x20ftypM4A " + bytes(100), "cannot be decoded|no audio"),
        (written(tone(), "FLAC", "PCM_16")[:3000], "cut off|cannot be decoded"),
        (m4a(tone())[:1000], "cannot be decoded|no audio|empty"),
    ],
)
def test_a_malformed_file_is_a_bad_request(data: bytes, message: str) -> None:
    with pytest.raises(BadRequestError, match=message) as error:
        decode(data)
    assert error.value.field == FIELD
    assert " at 0x" not in str(error.value), "an address in memory is nobody's business"
    assert "NoneType" not in str(error.value)


@pytest.mark.parametrize("form", ["wav", "flac", "m4a"])
def test_a_recording_over_the_limit_is_refused(form: str) -> None:
    long = tone(3 * RATE)
    made = {"wav": written(long), "flac": written(long, "FLAC", "PCM_16"), "m4a": m4a(long)}

    with pytest.raises(BadRequestError, match="longer than 2 s"):
        decode(made[form])


def test_a_header_that_hides_the_length_does_not_help() -> None:
    pcm = (tone(3 * RATE) * 32767).astype("<i2").tobytes()

    with pytest.raises(BadRequestError, match="longer than 2 s"):
        decode(wav_header(RATE, None) + pcm)


def test_the_declared_format_must_be_the_real_one() -> None:
    with pytest.raises(BadRequestError, match="format is 'mp3' but the data is wav") as error:
        decode(written(tone()), "mp3")
    assert error.value.field == "messages[0].content[1].input_audio.format"


@pytest.mark.parametrize("rate", [0, 1, 999, 400_000])
def test_impossible_rates_are_refused(rate: int) -> None:
    data = wav_header(rate, 4) + bytes(4)

    with pytest.raises(BadRequestError):
        decode(data)


def test_too_many_channels_are_refused() -> None:
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 64, RATE, RATE * 128, 128, 16)
    body = b"WAVE" + form + struct.pack("<4sI", b"data", 128) + bytes(128)

    with pytest.raises(BadRequestError, match="64 channels"):
        decode(b"RIFF" + struct.pack("<I", len(body)) + body)


def test_missing_bytes_are_counted_past_other_chunks() -> None:
    data = wav_header(RATE, 100)
    with_list = data[:36] + b"LIST\x04\0\0\0abcd" + data[36:]

    assert missing_bytes(with_list + bytes(60)) == 40
    assert missing_bytes(with_list + bytes(100)) == 0


def test_a_damaged_header_is_read_or_refused_and_nothing_else() -> None:
    rng = np.random.default_rng(0)
    whole = written(tone(2000))
    num_refused = 0
    for _ in range(200):
        data = bytearray(whole)
        for at in rng.integers(0, 60, 4):
            data[at] = rng.integers(0, 256)
        try:
            decode(bytes(data))
        except BadRequestError:
            num_refused += 1
    assert num_refused > 100


def test_the_container_is_known_by_its_first_bytes() -> None:
    assert sniff(b"") is None
    assert sniff(written(tone(10))) == "wav"


@pytest.mark.parametrize(("samples", "rate_hz"), [(1, RATE), (RATE // 100 - 1, RATE), (4000, 999)])
def test_what_no_stage_would_hear_is_refused_with_its_place(samples: int, rate_hz: int) -> None:
    buffer = io.BytesIO()
    soundfile.write(buffer, tone(samples), rate_hz, format="WAV", subtype="FLOAT")

    with pytest.raises(BadRequestError) as caught:
        decode(buffer.getvalue())
    assert caught.value.field == FIELD
