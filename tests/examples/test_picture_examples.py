"""The examples of pictures and videos run as a reader would run them, on tiny random models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from benchmarks.served import Server, serve
from tests.examples.test_examples import EXAMPLES, run
from vllm_omni.diffusion.models.qwen_image.tiny import make_tiny as make_qwen_image
from vllm_omni.diffusion.models.wan_video.tiny import make_tiny as make_wan_video

pytestmark = [pytest.mark.thorough, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pictures")


@pytest.fixture(scope="module")
def editor(folder: Path) -> Path:
    return make_qwen_image(folder / "editor", variant="edit")


@pytest.fixture(scope="module")
def animator(folder: Path) -> Path:
    return make_wan_video(folder / "animator", variant="i2v_2_1")


@pytest.fixture(scope="module")
def painter(folder: Path) -> Iterator[Server]:
    model = make_qwen_image(folder / "painter")
    with serve(model, folder / "painter.log", []) as server:
        yield server


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "house.png"
    Image.new("RGB", (64, 48), (200, 100, 50)).save(path)
    return path


def frames_of(path: Path) -> int:
    with av.open(str(path)) as container:
        return sum(1 for _ in container.decode(container.streams.video[0]))


def size_of(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        return image.size


def test_offline_text_to_image(painter: Server, folder: Path, tmp_path: Path) -> None:
    run(
        "offline_inference/text_to_image.py", "a fox", "a dog", "--model", folder / "painter",
        "--steps", 2, "--height", 64, "--width", 64, "--out", tmp_path, "--num-images", 2,
    )  # fmt: skip

    assert len(list(tmp_path.glob("image_?_?.png"))) == 4
    assert size_of(tmp_path / "image_1_1.png") == (64, 64)


def test_online_text_to_image(painter: Server, tmp_path: Path) -> None:
    output = run(
        "online_serving/text_to_image.py", "a fox", "--base-url", f"{painter.url}/v1",
        "--size", "64x64", "--steps", 2, "-n", 2, "--stream", "--out", tmp_path,
    )  # fmt: skip

    assert "step 2 of 2" in output
    assert size_of(tmp_path / "image_1.png") == (64, 64)


def test_image_to_image(editor: Path, picture: Path, tmp_path: Path) -> None:
    run(
        "offline_inference/image_to_image.py", "at night", "--image", picture, "--model", editor,
        "--steps", 2, "--out", tmp_path / "offline.png",
    )  # fmt: skip
    with serve(editor, tmp_path / "server.log", []) as server:
        run(
            "online_serving/image_to_image.py", "at night", "--image", picture, "--steps", 2,
            "--base-url", f"{server.url}/v1", "--out", tmp_path / "online.png",
        )  # fmt: skip

    offline, online = Image.open(tmp_path / "offline.png"), Image.open(tmp_path / "online.png")
    assert offline.size == online.size
    assert np.array_equal(np.asarray(offline), np.asarray(online)), "one seed, one picture"


def test_text_to_video(folder: Path, tmp_path: Path) -> None:
    model = make_wan_video(folder / "film")
    run(
        "offline_inference/text_to_video.py", "waves", "--model", model, "--steps", 2,
        "--num-frames", 5, "--height", 32, "--width", 32, "--out", tmp_path / "offline.mp4",
    )  # fmt: skip
    arguments = ["--data-dir", str(tmp_path / "data")]
    with serve(model, tmp_path / "server.log", arguments) as server:
        run(
            "online_serving/text_to_video.py", "waves", "--steps", 2, "--size", "32x32",
            "--seconds", "0.3", "--base-url", f"{server.url}/v1",
            "--out", tmp_path / "online.mp4",
        )  # fmt: skip

    assert frames_of(tmp_path / "offline.mp4") == 5
    assert frames_of(tmp_path / "online.mp4") == 5


def test_image_to_video(animator: Path, picture: Path, tmp_path: Path) -> None:
    run(
        "offline_inference/image_to_video.py", "waves", "--image", picture, "--model", animator,
        "--steps", 2, "--num-frames", 5, "--height", 32, "--width", 32,
        "--out", tmp_path / "offline.mp4",
    )  # fmt: skip
    arguments = ["--data-dir", str(tmp_path / "data")]
    with serve(animator, tmp_path / "server.log", arguments) as server:
        run(
            "online_serving/image_to_video.py", "waves", "--image", picture, "--steps", 2,
            "--size", "32x32", "--seconds", "0.3",
            "--base-url", f"{server.url}/v1", "--out", tmp_path / "online.mp4",
        )  # fmt: skip

    assert frames_of(tmp_path / "offline.mp4") == 5
    assert frames_of(tmp_path / "online.mp4") == 5


def test_arrays_become_pictures_in_order() -> None:
    source = (EXAMPLES / "offline_inference/text_to_image.py").read_text()
    names: dict[str, object] = {"__name__": "example"}
    exec(compile(source, "text_to_image.py", "exec"), names)
    normalize = names["_normalize_images_for_save"]
    batch = np.zeros((2, 8, 8, 3), np.float32)
    batch[1] = 1.0
    last = Image.new("RGB", (4, 4))

    assert callable(normalize)
    images = normalize([batch, last])

    assert [image.size for image in images] == [(8, 8), (8, 8), (4, 4)]
    assert images[1].getpixel((0, 0)) == (255, 255, 255)
    assert images[2] is last
    assert normalize([]) == []
