from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.media.video import VideoMediaIO

from tests.entrypoints.openai.media.clips import mp4, png
from vllm_omni.config.pipeline import Modality
from vllm_omni.entrypoints.openai.media.pictures import PictureLimits, load_image, load_video
from vllm_omni.entrypoints.openai.media.sources import EncodedMedia
from vllm_omni.errors import BadRequestError

FIELD = "messages[0].content[0].image_url.url"
LIMITS = PictureLimits(max_image_pixels=10_000, max_video_pixels=100_000, max_video_s=5.0)


def image(data: bytes) -> EncodedMedia:
    return EncodedMedia(data, FIELD, kind=Modality.IMAGE)


def video(data: bytes) -> EncodedMedia:
    return EncodedMedia(data, FIELD, kind=Modality.VIDEO)


def video_reader() -> VideoMediaIO:
    return VideoMediaIO(ImageMediaIO(), video_backend="qwen2_vl")


def test_an_image_is_decoded_as_it_is() -> None:
    loaded = load_image(image(png(16, 8)), ImageMediaIO(), LIMITS)
    assert np.array_equal(np.asarray(loaded.media), np.asarray(Image.open(io.BytesIO(png(16, 8)))))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"no image at all", "no image"),
        (png()[:60], "cannot be decoded"),
        (png(200, 100), r"image \(200x100\) has more than 10000 pixels"),
    ],
)
def test_an_image_that_cannot_be_served_names_its_field(data: bytes, message: str) -> None:
    with pytest.raises(BadRequestError, match=message) as caught:
        load_image(image(data), ImageMediaIO(), LIMITS)
    assert caught.value.field == FIELD


def test_frames_of_a_video_are_sampled() -> None:
    loaded = load_video(video(mp4(num_frames=16, rate=4)), video_reader(), LIMITS)
    frames, times = loaded.media
    assert frames.shape == (8, 48, 64, 3)
    assert times["frames_indices"] == [0, 2, 4, 6, 8, 10, 12, 14]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"no video at all", "no video"),
        (png(), "no video"),
        (mp4()[:200], "cannot be decoded"),
        (mp4(num_frames=24), "longer than 5 s"),
        (mp4(size=(320, 240)), r"4 frames of 320x240\) has more than 100000 pixels"),
    ],
)
def test_a_video_that_cannot_be_served_names_its_field(data: bytes, message: str) -> None:
    with pytest.raises(BadRequestError, match=message) as caught:
        load_video(video(data), video_reader(), LIMITS)
    assert caught.value.field == FIELD


def test_a_file_of_sound_alone_is_no_video() -> None:
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 4096), np.float32), "fltp", "mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    with pytest.raises(BadRequestError, match="holds no video"):
        load_video(video(buffer.getvalue()), video_reader(), LIMITS)
