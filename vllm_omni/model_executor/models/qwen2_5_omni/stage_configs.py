"""Configs of the autoregressive stages, made of the checkpoint's. Called by vLLM, which also calls
them with a config of another kind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch

TALKER_ARCHITECTURE: Final = "VllmOmniQwen25OmniTalker"
THINKER_ARCHITECTURE: Final = "VllmOmniQwen25OmniThinker"


def thinker_config(config: Any) -> Any:
    """The thinker's stage: our class of it."""
    if getattr(config, "thinker_config", None) is not None:
        config.architectures = [THINKER_ARCHITECTURE]
    return config


def talker_config(config: Any) -> Any:
    """The talker's stage: its own config at the root."""
    talker = getattr(config, "talker_config", None)
    if talker is None:
        return config
    talker.architectures = [TALKER_ARCHITECTURE]
    talker.thinker_vocab_size = config.thinker_config.text_config.vocab_size
    talker.eos_token_id = [talker.tts_codec_pad_token_id, talker.tts_codec_end_token_id]
    talker.speaker_id = speaker_tokens(Path(config.name_or_path))
    return talker


def speaker_tokens(model_dir: Path) -> dict[str, int]:
    """Each voice of a checkpoint and the text token that opens its speech."""
    speakers = torch.load(model_dir / "spk_dict.pt", weights_only=True, map_location="cpu")
    return {name: int(speaker["bos_token"]) for name, speaker in speakers.items()}
