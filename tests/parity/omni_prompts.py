"""Prompts of every kind for models that hear and see, and what transformers writes to them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image
from vllm.multimodal.media.audio import load_audio
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.media.video import VideoMediaIO

from tests.entrypoints.openai.media.clips import mp4, png

NUM_TOKENS: Final = 64
RATE_HZ: Final = 16000
_IMAGE: Final = {"type": "image"}
_AUDIO: Final = {"type": "audio"}
_VIDEO: Final = {"type": "video"}


@dataclass(frozen=True)
class Question:
    """One user turn with its media, in order."""

    parts: tuple[Mapping[str, str], ...]
    images: tuple[Any, ...] = ()
    audio: tuple[NDArray[np.float32], ...] = ()
    """Sounds of videos stand in their video's place."""
    videos: tuple[tuple[NDArray[np.uint8], dict[str, Any]], ...] = ()
    hears_videos: bool = False

    def prompt(self, text: str) -> dict[str, Any]:
        """As `Omni.generate` takes it, around the rendered text."""
        media: dict[str, Any] = {}
        if self.images:
            media["image"] = list(self.images)
        if self.audio:
            media["audio"] = [(samples, RATE_HZ) for samples in self.audio]
        if self.videos:
            media["video"] = list(self.videos)
        prompt: dict[str, Any] = {"prompt": text}
        if media:
            prompt["multi_modal_data"] = media
        if self.hears_videos:
            prompt["mm_processor_kwargs"] = {"use_audio_in_video": True}
        return prompt


def _says(text: str) -> Mapping[str, str]:
    return {"type": "text", "text": text}


def _image(index: int, width: int = 64, height: int = 48) -> Image.Image:
    return Image.open(io.BytesIO(png(width, height, seed=index))).convert("RGB")


def tone(seconds: float, step: float = 0.05) -> NDArray[np.float32]:
    wave = 0.1 * np.sin(np.arange(int(RATE_HZ * seconds)) * step)
    return wave.astype(np.float32)


def questions() -> dict[str, Question]:
    """One question of each kind."""
    clip = mp4(num_frames=8, rate=4, sound_s=2.0)
    reader = VideoMediaIO(ImageMediaIO(), video_backend="qwen2_vl")
    video = reader.load_bytes(clip).media
    sound, _ = load_audio(io.BytesIO(clip), sr=RATE_HZ, backend="pyav")
    images, sung = (_image(0), _image(1, 96, 64)), tone(1.5, 0.06)
    return {
        "text": Question((_says("Tell me about the sea."),)),
        "image": Question((_IMAGE, _says("What is this?")), images[:1]),
        "images": Question((_IMAGE, _says("And"), _IMAGE, _says("compare.")), images),
        "audio": Question((_AUDIO, _says("What is said?")), audio=(sung,)),
        "video": Question((_VIDEO, _says("What happens?")), videos=(video,)),
        "sounding-video": Question(
            (_VIDEO, _says("What happens?")), audio=(sound,), videos=(video,), hears_videos=True
        ),
        "extremes": Question(
            (_IMAGE, _IMAGE, _AUDIO, _says("Too small?")),
            (_image(2, 8, 8), _image(3, 1500, 10)),
            (tone(0.1),),
        ),
        "mixed": Question(
            (_IMAGE, _says("a"), _AUDIO, _VIDEO, _says("b"), _IMAGE), images, (sung,), (video,)
        ),
        "mixed-sounding": Question(
            (_IMAGE, _VIDEO, _says("a"), _AUDIO, _says("b")),
            images[:1],
            (sound, sung),
            (video,),
            hears_videos=True,
        ),
    }


@dataclass
class Reference:
    """Processor and model of a checkpoint, by transformers."""

    model_dir: Path
    model_class: str
    model: Any = field(init=False)
    _processor: Any = field(init=False)

    def __post_init__(self) -> None:
        transformers.logging.set_verbosity_error()
        torch.set_num_threads(1)
        self._processor = transformers.AutoProcessor.from_pretrained(self.model_dir)
        model_class = getattr(transformers, self.model_class)
        self.model = model_class.from_pretrained(self.model_dir, dtype=torch.float32).eval()

    def text(self, question: Question) -> str:
        """The turn through the checkpoint's chat template."""
        turns = [{"role": "user", "content": list(question.parts)}]
        text: str = self._processor.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True
        )
        return text

    def inputs(self, question: Question) -> dict[str, Any]:
        """What the model's `generate` takes."""
        media: dict[str, Any] = {}
        if question.images:
            media["images"] = list(question.images)
        if question.audio:
            media["audio"] = list(question.audio)
        if question.videos:
            media["videos"] = [frames for frames, _ in question.videos]
            media |= {"do_sample_frames": False, "use_audio_in_video": question.hears_videos}
        inputs = self._processor(text=self.text(question), return_tensors="pt", **media)
        return {**inputs, "use_audio_in_video": question.hears_videos}

    def answer(self, question: Question) -> tuple[list[int], list[int]]:
        """Token ids of the prompt, and the greedy ones after it."""
        inputs = self.inputs(question)
        prompt = inputs["input_ids"][0].tolist()
        with torch.inference_mode():
            ids = self.model.thinker.generate(
                **inputs, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False
            )
        return prompt, ids[0, len(prompt) :].tolist()
