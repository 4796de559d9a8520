"""From a request's audio items to samples: cheap checks of all, then fetch, then decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_omni.config.deploy import ServerLimits
from vllm_omni.entrypoints.openai.media.decode import AudioLimits, check_container, decode_audio
from vllm_omni.entrypoints.openai.media.fetch import MediaFetcher
from vllm_omni.entrypoints.openai.media.pool import MediaPool
from vllm_omni.entrypoints.openai.media.sources import (
    EncodedMedia,
    check_base64_size,
    decode_base64,
    split_data_url,
)
from vllm_omni.errors import BadRequestError
from vllm_omni.inputs.prompt import AudioInput


@dataclass(frozen=True, slots=True)
class AudioSource:
    """One audio item as the request names it: a base64 text or an http(s) URL."""

    field: str
    """Path in the request, as in `messages[0].content[1].input_audio.data`."""
    base64: str | None = None
    url: str | None = None
    declared_format: str | None = None


def audio_source_from_url(url: str, field: str) -> AudioSource:
    """A `data:` URL is its base64 text; anything else is fetched."""
    if url[:5].lower() == "data:":
        return AudioSource(field, base64=split_data_url(url, field))
    return AudioSource(field, url=url)


class AudioLoader:
    """Turns audio items into samples within the operator's limits."""

    def __init__(self, limits: ServerLimits, fetcher: MediaFetcher, pool: MediaPool) -> None:
        self._limits = limits
        self._fetcher = fetcher
        self._pool = pool

    def check(self, sources: Sequence[AudioSource]) -> None:
        """Refuse by count, size and address. Decodes nothing and connects nowhere."""
        if len(sources) > self._limits.max_media_items:
            raise BadRequestError(
                f"the request has {len(sources)} media items, "
                f"at most {self._limits.max_media_items} are allowed",
                field="messages",
            )
        for source in sources:
            if source.base64 is not None:
                check_base64_size(source.base64, self._limits.max_audio_bytes, source.field)
            else:
                self._fetcher.check(source.url or "", source.field)

    async def read(self, source: AudioSource) -> EncodedMedia:
        """The encoded bytes of one item, fetched if it is a URL."""
        limit = self._limits.max_audio_bytes
        if source.base64 is not None:
            data = await self._pool.run(decode_base64, source.base64, limit, source.field)
        else:
            data = await self._fetcher.fetch(source.url or "", limit, source.field)
        return EncodedMedia(data, source.field, source.declared_format)

    async def check_media(self, media: EncodedMedia) -> None:
        """Refuse what is no audio, without decoding samples (another decoder will)."""
        await self._pool.run(check_container, media)

    async def decode(self, media: EncodedMedia) -> AudioInput:
        limits = AudioLimits(self._limits.max_audio_bytes, self._limits.max_audio_s)
        return await self._pool.run(decode_audio, media, limits)

    async def load(self, sources: Sequence[AudioSource]) -> tuple[AudioInput, ...]:
        """Samples of every item, in order."""
        return tuple([await self.decode(await self.read(source)) for source in sources])
