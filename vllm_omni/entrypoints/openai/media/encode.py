"""Encode 16 bit mono samples, piece by piece or as one file.

The incremental encoders keep codec state, so one serves one stream. What needs a codec runs in
the media pool; raw PCM and WAV are copies and stay on the loop.
"""

from __future__ import annotations

import io
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, Protocol

import pybase64

from vllm_omni.entrypoints.openai.media.pool import MediaPool
from vllm_omni.entrypoints.openai.media.wav import wav_header
from vllm_omni.errors import BadRequestError
from vllm_omni.outputs.media import AudioChunk

EMPTY_SAMPLE_RATE_HZ: Final = 24_000
"""Named in the header of an answer that has no sample at all."""


class AudioEncoder(Protocol):
    """Turns consecutive samples of one stream into consecutive bytes of one file."""

    def encode(self, chunk: AudioChunk) -> bytes:
        """Bytes that are ready now; may be empty."""

    def finish(self) -> bytes:
        """What is left. The joined bytes are one valid file."""


@dataclass(frozen=True, slots=True)
class AudioFormat:
    """One format that clients may ask for."""

    name: str
    media_type: str
    container: str | None = None
    """Muxer of PyAV; None: raw samples, with or without a WAV header."""
    codec: str = ""
    codec_rate_hz: int | None = None
    """The one rate the codec takes; None: the samples' own."""
    muxer_options: tuple[tuple[str, str], ...] = ()
    needs_length: bool = False
    """Its header names the length, which a stream cannot know: common readers want a whole file."""

    @property
    def needs_codec(self) -> bool:
        return self.container is not None

    def encoder(self) -> AudioEncoder:
        if self.name == "wav":
            return _WavEncoder()
        if self.container is None:
            return _PcmEncoder()
        return _CodecEncoder(self)


_MP3_OPTIONS: Final = (("write_xing", "0"), ("id3v2_version", "0"))
FORMATS: Final = {
    form.name: form
    for form in (
        AudioFormat("wav", "audio/wav", needs_length=True),
        AudioFormat("pcm16", "audio/pcm"),
        AudioFormat("pcm", "audio/pcm"),
        AudioFormat("mp3", "audio/mpeg", "mp3", "libmp3lame", muxer_options=_MP3_OPTIONS),
        AudioFormat("flac", "audio/flac", "flac", "flac", needs_length=True),
        AudioFormat(
            "opus",
            "audio/ogg",
            "ogg",
            "libopus",
            48_000,
            muxer_options=(("page_duration", "20000"),),
        ),
        AudioFormat("aac", "audio/aac", "adts", "aac"),
    )
}
CHAT_FORMATS: Final = ("wav", "pcm16", "mp3", "flac", "opus")
SPEECH_FORMATS: Final = ("mp3", "opus", "aac", "flac", "wav", "pcm")


def find_format(name: str, allowed: tuple[str, ...], field: str) -> AudioFormat:
    """The format called `name`; a BadRequestError with the list when it is not one of `allowed`."""
    if name not in allowed:
        raise BadRequestError(
            f"audio format {name!r} is not known; use one of {', '.join(allowed)}", field=field
        )
    return FORMATS[name]


def encode_file(form: AudioFormat, audio: AudioChunk | None) -> bytes:
    """One complete file, with exact lengths in its header."""
    chunk = audio if audio is not None else AudioChunk(b"", EMPTY_SAMPLE_RATE_HZ)
    if form.name == "wav":
        return wav_header(chunk.sample_rate_hz, len(chunk.pcm)) + chunk.pcm
    if form.container is None:
        return chunk.pcm
    encoder = _CodecEncoder(form, seekable=True)
    return encoder.encode(chunk) + encoder.finish()


def encode_base64(form: AudioFormat, audio: AudioChunk | None) -> str:
    """`encode_file` as base64."""
    return pybase64.b64encode_as_string(encode_file(form, audio))


async def encode_chunk(encoder: AudioEncoder, chunk: AudioChunk | None, pool: MediaPool) -> bytes:
    """The next bytes of a stream; `chunk` None ends it. In the pool when a codec is at work."""
    if isinstance(encoder, _CodecEncoder):
        if chunk is None:
            return await pool.run(encoder.finish)
        return await pool.run(encoder.encode, chunk)
    return encoder.finish() if chunk is None else encoder.encode(chunk)


async def encode_stream(
    chunks: AsyncGenerator[AudioChunk, None], form: AudioFormat, pool: MediaPool
) -> AsyncGenerator[bytes, None]:
    """Bytes of one file, each piece as soon as the codec gives it out."""
    encoder = form.encoder()
    async with aclosing(chunks):
        async for chunk in chunks:
            if data := await encode_chunk(encoder, chunk, pool):
                yield data
    if data := await encode_chunk(encoder, None, pool):
        yield data


class _PcmEncoder:
    def encode(self, chunk: AudioChunk) -> bytes:
        return chunk.pcm

    def finish(self) -> bytes:
        return b""


class _WavEncoder:
    """A header of unknown length before the first samples, then samples only."""

    def __init__(self) -> None:
        self._started = False

    def encode(self, chunk: AudioChunk) -> bytes:
        if self._started:
            return chunk.pcm
        self._started = True
        return wav_header(chunk.sample_rate_hz, None) + chunk.pcm

    def finish(self) -> bytes:
        return b"" if self._started else wav_header(EMPTY_SAMPLE_RATE_HZ, 0)


class _Sink:
    """Takes what the muxer writes. Without `seek`, as a stream to a client has none."""

    def __init__(self) -> None:
        self._data = bytearray()

    def write(self, data: bytes) -> int:
        self._data += data
        return len(data)

    def take(self) -> bytes:
        data = bytes(self._data)
        self._data.clear()
        return data


class _CodecEncoder:
    """An encoder of PyAV, flushed after every packet."""

    def __init__(self, form: AudioFormat, *, seekable: bool = False) -> None:
        self._form = form
        self._file = io.BytesIO() if seekable else None
        self._sink = _Sink()
        self._num_samples = 0
        self._container: Any = None
        self._stream: Any = None

    def encode(self, chunk: AudioChunk) -> bytes:
        import av
        import numpy as np

        self._open(chunk.sample_rate_hz)
        if chunk.num_samples:
            samples = np.frombuffer(chunk.pcm, dtype="<i2")[None]
            frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
            frame.sample_rate = chunk.sample_rate_hz
            frame.pts = self._num_samples
            self._num_samples += chunk.num_samples
            self._container.mux(self._stream.encode(frame))
        return self._sink.take()

    def finish(self) -> bytes:
        self._open(EMPTY_SAMPLE_RATE_HZ)
        if self._num_samples:
            self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._file.getvalue() if self._file is not None else self._sink.take()

    def _open(self, sample_rate_hz: int) -> None:
        """The container is made with the first samples: they bring the rate."""
        if self._container is not None:
            return
        import av

        form = self._form
        options = {**dict(form.muxer_options), "flush_packets": "1"}
        target = self._file if self._file is not None else self._sink
        self._container = av.open(target, "w", format=form.container, options=options)
        rate = form.codec_rate_hz or sample_rate_hz
        self._stream = self._container.add_stream(form.codec, rate=rate, layout="mono")
