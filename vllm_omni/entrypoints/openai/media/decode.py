"""Decode a client's audio: header first, then samples, both bounded. Runs in the media pool.

libsndfile reads WAV, FLAC, Ogg and MP3; PyAV reads what is left (M4A, WebM, AAC).
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from vllm_omni.config.pipeline import Modality
from vllm_omni.engine.ar_speech import MAX_RATE_HZ, MIN_AUDIO_S, MIN_RATE_HZ
from vllm_omni.entrypoints.openai.media.sources import EncodedMedia
from vllm_omni.entrypoints.openai.media.wav import missing_bytes
from vllm_omni.errors import BadRequestError
from vllm_omni.inputs.prompt import AudioInput

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MAX_CHANNELS: Final = 8
_BLOCK_FRAMES: Final = 1 << 16
_UNKNOWN_FRAMES: Final = 1 << 40
_CONTAINERS: Final = {
    "wav": ("wav",),
    "mp3": ("mp3",),
    "mpeg": ("mp3",),
    "mpga": ("mp3",),
    "flac": ("flac",),
    "ogg": ("ogg",),
    "opus": ("ogg", "webm"),
    "m4a": ("mp4",),
    "mp4": ("mp4",),
    "aac": ("aac", "mp4"),
    "webm": ("webm",),
}
INPUT_FORMATS: Final = tuple(_CONTAINERS)
"""Values of `input_audio.format`."""


@dataclass(frozen=True, slots=True)
class AudioLimits:
    """What one item may cost."""

    max_bytes: int
    max_s: float


def decode_audio(media: EncodedMedia, limits: AudioLimits) -> AudioInput:
    """Mono float32 samples at the file's own rate.

    Raises:
        BadRequestError: names `media.field`; nothing was decoded beyond the limits.
    """
    container = check_container(media)
    try:
        if container in ("mp4", "webm", "aac", "avi"):
            samples, rate = _read_with_av(media, limits)
        else:
            samples, rate = _read_with_soundfile(media, limits)
    except BadRequestError:
        raise
    except Exception as exc:
        # The codecs raise what they like, and the file is a client's: this request fails alone.
        raise _malformed(media, container, exc) from exc
    return AudioInput(_checked(samples, rate, media), rate)


def check_container(media: EncodedMedia) -> str:
    """Name of the container, by its first bytes; refuses unknown, wrong and cut-off ones."""
    container = sniff(media.data)
    if container is None:
        raise BadRequestError(
            "the data is no audio that this server reads (wav, mp3, flac, ogg, m4a, webm, aac)",
            field=media.field,
        )
    declared = media.declared_format
    if declared is not None and container not in _CONTAINERS.get(declared, ()):
        raise BadRequestError(
            f"format is {declared!r} but the data is {container}",
            field=media.field.removesuffix("data") + "format",
        )
    if container == "wav" and (missing := missing_bytes(media.data)):
        raise BadRequestError(f"the wav file is cut off: {missing} bytes miss", field=media.field)
    return container


def sniff(data: bytes) -> str | None:
    """Container by magic number; None when it is none of ours."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return "wav"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    if data[:4] == b"fLaC":
        return "flac"
    if data[:4] == b"OggS":
        return "ogg"
    if data[:4] == b"\x1aE\xdf\xa3":
        return "webm"
    if data[4:8] == b"ftyp":
        return "mp4"
    if data[:3] == b"ID3":
        return "mp3"
    if len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0:
        return "aac" if data[1] & 0x06 == 0 else "mp3"
    return None


def _read_with_soundfile(
    media: EncodedMedia, limits: AudioLimits
) -> tuple[NDArray[np.float32], int]:
    import numpy as np
    import soundfile

    with soundfile.SoundFile(io.BytesIO(media.data)) as file:
        _check_shape(media, file.samplerate, file.channels)
        bound = int(limits.max_s * file.samplerate)
        if file.frames >= _UNKNOWN_FRAMES:
            return _read_with_av(media, limits)  # a streamed FLAC, which libsndfile cannot end
        if file.frames > bound:
            raise _too_long(media, limits)
        blocks: list[NDArray[np.float32]] = []
        num_frames = 0
        while len(block := file.read(_BLOCK_FRAMES, dtype="float32", always_2d=True)):
            blocks.append(block.mean(axis=1))
            num_frames += len(block)
            if num_frames > bound:
                raise _too_long(media, limits)
        # MP3 and Ogg headers only estimate the length; the other formats state it.
        if file.format in ("WAV", "FLAC") and num_frames < file.frames:
            raise BadRequestError("the audio file is cut off", field=media.field)
        return (np.concatenate(blocks) if blocks else np.zeros(0, np.float32)), file.samplerate


def _read_with_av(media: EncodedMedia, limits: AudioLimits) -> tuple[NDArray[np.float32], int]:
    import av
    import numpy as np

    with av.open(io.BytesIO(media.data)) as container:
        if not container.streams.audio:
            raise BadRequestError(f"the {_file_of(media)} has no sound", field=media.field)
        stream = container.streams.audio[0]
        if stream.codec_context is None:
            raise BadRequestError("the file is cut off or damaged", field=media.field)
        rate = stream.codec_context.sample_rate
        _check_shape(media, rate, stream.codec_context.channels)
        length_s = container.duration / av.time_base if container.duration else 0.0
        if length_s > limits.max_s + 0.5:
            raise _too_long(media, limits)
        resampler = av.AudioResampler(format="fltp", layout="mono", rate=rate)
        parts, num_samples = [], 0
        for frame in container.decode(stream):
            for mono in resampler.resample(frame):
                parts.append(mono.to_ndarray()[0])
                num_samples += mono.samples
            if num_samples > limits.max_s * rate:
                raise _too_long(media, limits)
        return (np.concatenate(parts) if parts else np.zeros(0, np.float32)), rate


def _check_shape(media: EncodedMedia, rate_hz: int, num_channels: int) -> None:
    if not MIN_RATE_HZ <= rate_hz <= MAX_RATE_HZ:
        raise BadRequestError(f"a sample rate of {rate_hz} Hz is not served", field=media.field)
    if not 1 <= num_channels <= _MAX_CHANNELS:
        raise BadRequestError(f"{num_channels} channels are not served", field=media.field)


def _checked(
    samples: NDArray[np.float32], rate_hz: int, media: EncodedMedia
) -> NDArray[np.float32]:
    import numpy as np

    if samples.size == 0:
        raise BadRequestError("the audio is empty", field=media.field)
    if samples.size < MIN_AUDIO_S * rate_hz:
        raise BadRequestError(f"the audio is shorter than {MIN_AUDIO_S:g} s", field=media.field)
    if not np.isfinite(samples).all():
        raise BadRequestError("the audio has samples that are not numbers", field=media.field)
    return np.clip(samples, -1.0, 1.0).astype(np.float32, copy=False)


def _file_of(media: EncodedMedia) -> str:
    return "video" if media.kind is Modality.VIDEO else "audio file"


def _too_long(media: EncodedMedia, limits: AudioLimits) -> BadRequestError:
    return BadRequestError(f"the audio is longer than {limits.max_s:g} s", field=media.field)


def _malformed(media: EncodedMedia, container: str, exc: Exception) -> BadRequestError:
    # libsndfile's text without the name of the buffer it read, which is an address in memory.
    text = str(getattr(exc, "error_string", exc)).strip()
    reason = text.splitlines()[0][:120] if text else type(exc).__name__
    return BadRequestError(f"the {container} data cannot be decoded: {reason}", field=media.field)
