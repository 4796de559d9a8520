"""Images and videos of a client: header first, bounded, then decoded by vLLM's readers.

Runs in the media pool. Every refusal names the item's place in the request.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from vllm_omni.entrypoints.openai.media.sources import EncodedMedia
from vllm_omni.errors import BadRequestError

if TYPE_CHECKING:
    import av.container
    from vllm.multimodal.media import MediaWithBytes
    from vllm.multimodal.media.image import ImageMediaIO
    from vllm.multimodal.media.video import VideoMediaIO

SAMPLED_FRAMES_PER_S: Final = 2.0
"""Frames that vLLM's readers take of a second of video, unless the operator says otherwise."""

_DURATION_SLACK_S: Final = 0.5
_PIXEL_BYTES: Final = 3


@dataclass(frozen=True, slots=True)
class PictureLimits:
    """What one item may cost."""

    max_image_pixels: int
    max_video_pixels: int
    """Of all frames that are taken of one video."""
    max_video_s: float


def load_image(
    media: EncodedMedia, reader: ImageMediaIO, limits: PictureLimits
) -> MediaWithBytes[object]:
    """The picture, in the mode that the reader wants.

    Raises:
        BadRequestError: no image, damaged, or too large; nothing was decoded beyond the limits.
    """
    _check_image(media, limits)
    try:
        return reader.load_bytes(media.data)
    except Exception as exc:
        # The codecs raise what they like, and the file is a client's: this request fails alone.
        raise _malformed(media, exc) from exc


def load_video(
    media: EncodedMedia, reader: VideoMediaIO, limits: PictureLimits
) -> MediaWithBytes[object]:
    """Frames sampled over the video, with what their times follow from.

    Raises:
        BadRequestError: no video, damaged, without frames, or too large.
    """
    _check_video(media, limits)
    try:
        video = reader.load_bytes(media.data)
    except Exception as exc:
        # As above.
        raise _malformed(media, exc) from exc
    frames, _ = video.media
    if not len(frames):
        raise BadRequestError("the video has no frames", field=media.field)
    return video


def size_bytes(loaded: MediaWithBytes[object]) -> int:
    """What a decoded picture or video takes."""
    media = loaded.media
    if isinstance(media, tuple):  # a video's frames, with what is known of them
        return int(media[0].nbytes)
    size: tuple[int, int] = getattr(media, "size", (0, 0))
    return size[0] * size[1] * _PIXEL_BYTES


def _check_image(media: EncodedMedia, limits: PictureLimits) -> None:
    """Read the header alone."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(media.data)) as image:
            width, height = image.size
    except UnidentifiedImageError:
        raise BadRequestError(
            "the data is no image that this server reads", field=media.field
        ) from None
    except Image.DecompressionBombError:
        raise _too_many(limits.max_image_pixels, media) from None
    except Exception as exc:
        # As in `load_image`.
        raise _malformed(media, exc) from exc
    if width * height > limits.max_image_pixels:
        raise _too_many(limits.max_image_pixels, media, f"{width}x{height}")


def _check_video(media: EncodedMedia, limits: PictureLimits) -> None:
    """Read the headers of the container alone."""
    import av

    if not is_video(media.data):
        raise BadRequestError(
            "the data is no video that this server reads (mp4, mov, webm, mkv, avi)",
            field=media.field,
        )
    try:
        with av.open(io.BytesIO(media.data)) as container:
            seconds, width, height = _measure(container, media)
    except BadRequestError:
        raise
    except Exception as exc:
        # As in `load_image`.
        raise _malformed(media, exc) from exc
    if seconds > limits.max_video_s + _DURATION_SLACK_S:
        raise BadRequestError(
            f"the video is longer than {limits.max_video_s:g} s", field=media.field
        )
    num_frames = max(1, int(seconds * SAMPLED_FRAMES_PER_S))
    if num_frames * width * height > limits.max_video_pixels:
        raise _too_many(limits.max_video_pixels, media, f"{num_frames} frames of {width}x{height}")


def _measure(container: av.container.InputContainer, media: EncodedMedia) -> tuple[float, int, int]:
    """Length in seconds, width and height of the first video stream."""
    import av

    if not container.streams.video:
        raise BadRequestError("the file holds no video", field=media.field)
    stream = container.streams.video[0]
    width, height = stream.codec_context.width, stream.codec_context.height
    if not width or not height:
        raise BadRequestError("the video has no frames", field=media.field)
    if container.duration:
        seconds = container.duration / av.time_base
    elif stream.duration and stream.time_base:
        seconds = float(stream.duration * stream.time_base)
    else:
        # No header says: every frame may be taken.
        seconds = sum(1 for packet in container.demux(stream) if packet.size)
        seconds /= SAMPLED_FRAMES_PER_S
    return float(seconds), width, height


def is_video(data: bytes) -> bool:
    """Whether the first bytes are those of a video container."""
    return (
        data[4:8] == b"ftyp"
        or data[:4] == b"\x1aE\xdf\xa3"
        or (data[:4] == b"RIFF" and data[8:12] == b"AVI ")
    )


def _too_many(limit: int, media: EncodedMedia, size: str = "") -> BadRequestError:
    what = f" ({size})" if size else ""
    return BadRequestError(
        f"the {media.kind}{what} has more than {limit} pixels", field=media.field
    )


def _malformed(media: EncodedMedia, exc: Exception) -> BadRequestError:
    text = str(exc).strip()
    reason = text.splitlines()[0][:120] if text else type(exc).__name__
    return BadRequestError(f"the {media.kind} cannot be decoded: {reason}", field=media.field)
