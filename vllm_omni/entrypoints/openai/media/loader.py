"""From a request's media items to samples and pictures: cheap checks of all, fetch, then decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_omni.config.deploy import ServerLimits
from vllm_omni.config.pipeline import Modality
from vllm_omni.entrypoints.openai.input_memory import hold
from vllm_omni.entrypoints.openai.media.decode import AudioLimits, decode_audio
from vllm_omni.entrypoints.openai.media.fetch import MediaFetcher
from vllm_omni.entrypoints.openai.media.pictures import (
    PictureLimits,
    load_image,
    load_video,
    size_bytes,
)
from vllm_omni.entrypoints.openai.media.pool import MediaPool
from vllm_omni.entrypoints.openai.media.sources import (
    EncodedMedia,
    check_base64_size,
    decode_base64,
    split_data_url,
)
from vllm_omni.errors import BadRequestError
from vllm_omni.inputs.prompt import AudioInput

if TYPE_CHECKING:
    from vllm.multimodal.media import MediaWithBytes
    from vllm.multimodal.media.image import ImageMediaIO
    from vllm.multimodal.media.video import VideoMediaIO


@dataclass(frozen=True, slots=True)
class MediaSource:
    """One media item as the request names it: a base64 text or an http(s) URL."""

    field: str
    """Path in the request, as in `messages[0].content[1].input_audio.data`."""
    kind: Modality = Modality.AUDIO
    base64: str | None = None
    url: str | None = None
    declared_format: str | None = None


def source_from_url(url: str, field: str, kind: Modality = Modality.AUDIO) -> MediaSource:
    """A `data:` URL is its base64 text; anything else is fetched."""
    if url[:5].lower() == "data:":
        return MediaSource(field, kind, base64=split_data_url(url, field, kind))
    return MediaSource(field, kind, url=url)


class MediaLoader:
    """Turns media items into what a model's processor takes, within the operator's limits."""

    def __init__(self, limits: ServerLimits, fetcher: MediaFetcher, pool: MediaPool) -> None:
        self._limits = limits
        self._fetcher = fetcher
        self._pool = pool
        self._max_bytes = {
            Modality.AUDIO: limits.max_audio_bytes,
            Modality.IMAGE: limits.max_image_bytes,
            Modality.VIDEO: limits.max_video_bytes,
        }
        self._audio = AudioLimits(limits.max_audio_bytes, limits.max_audio_s)
        self._sound = AudioLimits(limits.max_video_bytes, limits.max_video_s)
        self._pictures = PictureLimits(
            limits.max_image_pixels, limits.max_video_pixels, limits.max_video_s
        )

    def check(self, sources: Sequence[MediaSource]) -> None:
        """Refuse by count, size and address. Decodes nothing and connects nowhere."""
        if len(sources) > self._limits.max_media_items:
            raise BadRequestError(
                f"the request has {len(sources)} media items, "
                f"at most {self._limits.max_media_items} are allowed",
                field="messages",
            )
        for source in sources:
            if source.base64 is not None:
                limit = self._max_bytes[source.kind]
                check_base64_size(source.base64, limit, source.field, source.kind)
            else:
                self._fetcher.check(source.url or "", source.field)

    async def read(self, source: MediaSource) -> EncodedMedia:
        """The encoded bytes of one item, fetched if it is a URL."""
        limit, kind = self._max_bytes[source.kind], source.kind
        if source.base64 is not None:
            data = await self._pool.run(decode_base64, source.base64, limit, source.field, kind)
        else:
            data = await self._fetcher.fetch(source.url or "", limit, source.field)
        return EncodedMedia(data, source.field, source.declared_format, kind)

    async def decode(self, media: EncodedMedia) -> AudioInput:
        """Samples of an audio item, or of the sound of a video."""
        limits = self._sound if media.kind is Modality.VIDEO else self._audio
        audio = await self._pool.run(decode_audio, media, limits)
        hold(audio.samples.nbytes, media.field)
        return audio

    async def image(self, media: EncodedMedia, reader: ImageMediaIO) -> MediaWithBytes[object]:
        """The picture of an image item, by vLLM's reader."""
        image = await self._pool.run(load_image, media, reader, self._pictures)
        hold(size_bytes(image), media.field)
        return image

    async def video(self, media: EncodedMedia, reader: VideoMediaIO) -> MediaWithBytes[object]:
        """Sampled frames of a video item with their times, by vLLM's reader."""
        video = await self._pool.run(load_video, media, reader, self._pictures)
        hold(size_bytes(video), media.field)
        return video

    async def load(self, sources: Sequence[MediaSource]) -> tuple[AudioInput, ...]:
        """Samples of every audio item, in order."""
        return tuple([await self.decode(await self.read(source)) for source in sources])
