"""The config of the talker's stage, made of the checkpoint's: the talker's own at its root. Called
by vLLM, which also calls it with a config of another kind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch

TALKER_ARCHITECTURE: Final = "VllmOmniQwen25OmniTalker"


def talker_config(config: Any) -> Any:
    """The talker's stage."""
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
