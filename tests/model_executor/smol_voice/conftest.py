from __future__ import annotations

from pathlib import Path

import pytest

from vllm_omni.generation.model import ModelContext
from vllm_omni.model_executor.models.smol_voice.tiny import make_tiny_voice, train_tokenizer
from vllm_omni.model_executor.models.smol_voice.voice import PiperVoice


@pytest.fixture(scope="session")
def voice_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_voice(tmp_path_factory.mktemp("voice"))


@pytest.fixture
def voice(voice_dir: Path) -> PiperVoice:
    return PiperVoice(ModelContext(model_dir=voice_dir, device="cpu", num_threads=1))


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(("<|endoftext|>", "<|im_start|>", "<|im_end|>")).save(
        str(folder / "tokenizer.json")
    )
    return folder
