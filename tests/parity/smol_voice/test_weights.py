"""The assembled checkpoints hold the weights of their sources, and recognise what they do."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.demo_model import demo_model_dir
from vllm_omni.generation.model import ModelContext, Work
from vllm_omni.inputs.prompt import OmniPrompt
from vllm_omni.model_executor.models.smol_voice.assemble import find_sources
from vllm_omni.model_executor.models.smol_voice.voice import PiperVoice
from vllm_omni.outputs.media import AudioChunk

pytestmark = [pytest.mark.weights, pytest.mark.slow, pytest.mark.timeout(300)]

SENTENCE = "The quick brown fox jumps over the lazy dog, and nobody knows why."


def spoken(text: str, rate_hz: int) -> np.ndarray:
    import soxr

    model_dir = demo_model_dir() / "voice"
    voice = PiperVoice(ModelContext(model_dir=model_dir, device="cpu", num_threads=2))
    state, items = voice.start(OmniPrompt(text=text), None)
    chunks = [voice.forward([Work(state, item, is_last=False)])[0] for item in items]
    samples = [chunk.samples() for chunk in chunks if isinstance(chunk, AudioChunk)]
    return soxr.resample(np.concatenate(samples), voice.settings.sample_rate_hz, rate_hz)


def test_the_recogniser_is_the_one_it_was_converted_from() -> None:
    """Token for token what CTranslate2 finds with its own form of the weights."""
    import ctranslate2
    import torch
    from transformers import WhisperForConditionalGeneration, WhisperProcessor

    samples = spoken(SENTENCE, 16_000)
    asr_dir = demo_model_dir() / "asr"
    processor = WhisperProcessor.from_pretrained(asr_dir)
    model = WhisperForConditionalGeneration.from_pretrained(asr_dir, dtype=torch.float32)
    features = processor(samples, sampling_rate=16_000, return_tensors="pt").input_features
    start = processor.tokenizer.convert_tokens_to_ids(["<|startoftranscript|>", "<|notimestamps|>"])

    reference = ctranslate2.models.Whisper(
        str(find_sources()["asr"] / "model"), compute_type="float32"
    )
    (expected,) = reference.generate(
        ctranslate2.StorageView.from_array(features.numpy()), [start], beam_size=1
    )
    with torch.inference_mode():
        ids = model.generate(
            features, decoder_input_ids=torch.tensor([start]), do_sample=False, num_beams=1
        )[0].tolist()
    end = processor.tokenizer.eos_token_id
    written = [token_id for token_id in ids if token_id not in (*start, end)]

    assert written == [t for t in expected.sequences_ids[0] if t != end]
    text = processor.tokenizer.decode(written)
    assert _words(text) == _words(SENTENCE)


def test_the_thinker_is_the_one_it_was_converted_from() -> None:
    """Every tensor as transformers' own GGUF reader gives it, in bfloat16."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    pytest.importorskip("accelerate")
    (gguf_file,) = find_sources()["thinker"].glob("*.gguf")
    reference = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent,
        gguf_file=gguf_file.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    ).state_dict()
    weights = load_file(demo_model_dir() / "thinker" / "model.safetensors")

    assert set(reference) - set(weights) == {"lm_head.weight"}  # tied to the embeddings
    assert set(weights) <= set(reference)
    for name, weight in weights.items():
        assert torch.equal(weight, reference[name].to(torch.bfloat16)), name

    ours = AutoTokenizer.from_pretrained(demo_model_dir() / "thinker")
    theirs = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    for text in ("Hello there", "In 1234 I'd pay 3.5\n\n  two", "caf\u00e9 \U0001f642", "a  b"):
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == text


def test_the_voice_is_pipers_own(tmp_path: Path) -> None:
    """Without noise, sample by sample (but for the last bit of rounding) what piper-tts says."""
    import json
    import shutil

    piper = pytest.importorskip("piper")
    source = next((find_sources()["voice"] / "data").glob("*.onnx"))
    shutil.copytree(demo_model_dir() / "voice", tmp_path / "voice")
    settings_path = tmp_path / "voice" / "voice.json"
    settings = json.loads(settings_path.read_text())
    settings["inference"].update(noise_scale=0.0, noise_w=0.0)
    settings_path.write_text(json.dumps(settings))

    voice = PiperVoice(ModelContext(model_dir=tmp_path / "voice", device="cpu", num_threads=2))
    state, _ = voice.start(None, None)
    (chunk,) = voice.forward([Work(state, SENTENCE, is_last=True)])
    assert isinstance(chunk, AudioChunk)

    scales = piper.SynthesisConfig(noise_scale=0.0, noise_w_scale=0.0, normalize_audio=False)
    reference = piper.PiperVoice.load(source, f"{source}.json")
    (expected,) = reference.synthesize(SENTENCE, scales)

    assert chunk.num_samples == len(expected.audio_float_array)
    np.testing.assert_allclose(chunk.samples(), expected.audio_float_array, atol=2e-4)


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())
