"""Configs of the autoregressive stages, made of the checkpoint's. Called by vLLM, which also calls
them with a config of another kind.
"""

from __future__ import annotations

from typing import Any, Final

TALKER_ARCHITECTURE: Final = "VllmOmniQwen3OmniTalker"
THINKER_ARCHITECTURE: Final = "VllmOmniQwen3OmniThinker"

_FROM_ROOT: Final = (
    "tts_pad_token_id",
    "tts_bos_token_id",
    "tts_eos_token_id",
    "im_start_token_id",
    "user_token_id",
    "assistant_token_id",
)


def thinker_config(config: Any) -> Any:
    """The thinker's stage: what vLLM's class reads and transformers' config has no field for."""
    thinker = getattr(config, "thinker_config", None)
    if thinker is None:
        return config
    config.architectures = [THINKER_ARCHITECTURE]
    if not hasattr(thinker.text_config, "tie_word_embeddings"):
        thinker.text_config.tie_word_embeddings = False
    return config


def talker_config(config: Any) -> Any:
    """The talker's stage: its own config at the root."""
    talker = getattr(config, "talker_config", None)
    if talker is None:
        return config
    talker.architectures = [TALKER_ARCHITECTURE]
    for name in _FROM_ROOT:
        setattr(talker, name, getattr(config, name))
    talker.thinker_vocab_size = config.thinker_config.text_config.vocab_size
    text = talker.text_config
    text.eos_token_id = talker.codec_eos_token_id
    rope = dict(text.rope_parameters)
    if "mrope_section" in rope:
        rope["mrope_interleaved"] = True  # the only way that this architecture rotates
    text.rope_parameters = rope
    return talker
