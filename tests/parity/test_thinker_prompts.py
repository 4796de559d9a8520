"""What the engine is given for a prompt is what transformers' processor makes of it.

Needs no weights: configs and processors of the released sizes, tokens, features and positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from vllm import SamplingParams
from vllm.model_executor.model_loader import get_model_cls

from tests.ar_replicas import spec_of
from tests.parity.omni_prompts import RATE_HZ, Question, questions, tone
from vllm_omni.engine.ar_config import build_vllm_config
from vllm_omni.engine.ar_preparer import ArPreparer
from vllm_omni.entrypoints.prompts import parse_prompt
from vllm_omni.model_executor.models.qwen2_5_omni import pipeline as qwen2_5
from vllm_omni.model_executor.models.qwen2_5_omni.tiny import make_real as make_qwen2_5
from vllm_omni.model_executor.models.qwen3_omni import pipeline as qwen3
from vllm_omni.model_executor.models.qwen3_omni.tiny import make_real as make_qwen3

pytestmark = [pytest.mark.thorough, pytest.mark.slow, pytest.mark.timeout(300)]

Family = tuple[Callable[[Path], Path], Any, str]
FAMILIES: dict[str, Family] = {
    "qwen3": (make_qwen3, qwen3, "Qwen3OmniMoeThinkerForConditionalGeneration"),
    "qwen2.5": (make_qwen2_5, qwen2_5, "Qwen2_5OmniThinkerForConditionalGeneration"),
}


def more_questions() -> dict[str, Question]:
    """Lengths of audio that fill no whole number of frames, and sounds in several places."""
    asked = questions()
    audio, video = {"type": "audio"}, {"type": "video"}
    sounding = asked["sounding-video"]
    (sound,), (clip,) = sounding.audio, sounding.videos
    return asked | {
        "odd audio": Question((audio,), audio=(tone(1.006),)),
        "odd audio items": Question((audio, audio), audio=(tone(0.7716), tone(1.8751))),
        "audio before a sounding video": Question(
            (audio, video), audio=(tone(0.5), sound), videos=(clip,), hears_videos=True
        ),
        "sounding videos around audio": Question(
            (video, audio, video),
            audio=(sound, tone(0.625), sound[: RATE_HZ + 7]),
            videos=(clip, clip),
            hears_videos=True,
        ),
        "a sound longer than its video": Question(
            (video, audio), audio=(tone(7.3), sound), videos=(clip,), hears_videos=True
        ),
    }


class Both:
    """One family: our half and the reference's, on the same folder."""

    def __init__(self, folder: Path, family: Family) -> None:
        make, pipeline, reference = family
        make(folder)
        transformers.logging.set_verbosity_error()
        self.processor = transformers.AutoProcessor.from_pretrained(folder)
        spec = spec_of(
            folder,
            has_targets=False,
            hf_config=pipeline.THINKER.hf_config,
            engine_args={"dtype": "float32", "load_format": "dummy"},
        )
        self.config, _ = build_vllm_config(spec)
        self.preparer = ArPreparer("thinker", self.config)
        thinker = self.config.model_config.hf_config.thinker_config
        self.ours = _without_weights(get_model_cls(self.config.model_config), thinker)
        self.theirs = _without_weights(getattr(transformers, reference), thinker)
        self.theirs.spatial_merge_size = thinker.vision_config.spatial_merge_size

    def inputs(self, question: Question) -> Any:
        """As the reference makes them."""
        options: dict[str, Any] = {}
        if question.images:
            options["images"] = list(question.images)
        if question.audio:
            options["audio"] = list(question.audio)
        if question.videos:
            options["videos"] = [frames for frames, _ in question.videos]
            options |= {"do_sample_frames": False, "use_audio_in_video": question.hears_videos}
        return self.processor(text=self.text(question), return_tensors="pt", **options)

    def text(self, question: Question) -> str:
        turns = [{"role": "user", "content": list(question.parts)}]
        text: str = self.processor.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True
        )
        return text

    def positions(self, inputs: Any, question: Question) -> torch.Tensor:
        mask = inputs.get("feature_attention_mask")
        grids = inputs.get("video_second_per_grid")
        positions, _ = self.theirs.get_rope_index(
            inputs["input_ids"],
            inputs.get("image_grid_thw"),
            inputs.get("video_grid_thw"),
            torch.ones_like(inputs["input_ids"]),
            question.hears_videos,
            mask.sum(-1) if mask is not None else None,
            torch.as_tensor(grids) if grids is not None else None,
        )
        return positions[:, 0].long()


def _without_weights(model_class: type, config: Any) -> Any:
    """An object with the methods of a model and nothing else."""
    model = model_class.__new__(model_class)
    torch.nn.Module.__init__(model)
    model.config = config
    return model


@pytest.fixture(scope="module", params=list(FAMILIES))
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    both = Both(tmp_path_factory.mktemp("real") / "model", FAMILIES[request.param])
    yield both
    both.preparer.shutdown()


@pytest.mark.parametrize("name", list(more_questions()))
async def test_prompts_become_what_the_reference_makes_of_them(both: Both, name: str) -> None:
    question = more_questions()[name]
    inputs = both.inputs(question)

    prompt = parse_prompt(question.prompt(both.text(question)))
    prompt = dataclasses.replace(prompt, extra={**prompt.extra, "add_special_tokens": False})
    (prepared,) = await both.preparer.prepare("r", prompt, SamplingParams(), {})
    (request,) = prepared.requests

    assert request.prompt_token_ids == inputs["input_ids"][0].tolist()
    features = request.mm_features or []
    heard = [f.data["input_audio_features"].data for f in features if f.modality == "audio"]
    if heard:
        mask = inputs["feature_attention_mask"].bool()
        expected = [f[:, m] for f, m in zip(inputs["input_features"], mask, strict=True)]
        order = np.argsort([f.mm_position.offset for f in features if f.modality == "audio"])
        for ours, theirs in zip([heard[i] for i in order], expected, strict=True):
            torch.testing.assert_close(ours, theirs)
    if features:
        ours, _ = both.ours.get_mrope_input_positions(request.prompt_token_ids, features)
        assert torch.equal(ours.long(), both.positions(inputs, question))


async def test_audio_of_another_rate_is_resampled(both: Both) -> None:
    question = questions()["audio"]
    prompt = question.prompt(both.text(question))
    prompt["multi_modal_data"]["audio"] = [(np.zeros(44100, np.float32), 44100)]
    (prepared,) = await both.preparer.prepare("r", parse_prompt(prompt), SamplingParams(), {})
    (feature,) = prepared.requests[0].mm_features
    assert int(feature.data["audio_feature_lengths"].data) == 100
