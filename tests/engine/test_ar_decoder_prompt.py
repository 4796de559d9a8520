"""A checkpoint's own decoder prompt replaces the model class's; what a user wrote stays."""

from __future__ import annotations

import pytest

from vllm_omni.engine.ar_speech import with_decoder_prompt

OWN = "<|startoftranscript|><|notimestamps|>"
USUAL = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (USUAL, OWN),
        (f"<|startofprev|> names: Ann{USUAL}", f"<|startofprev|> names: Ann{OWN}"),
        ("something else", OWN),
    ],
)
def test_the_decoder_prompt_is_replaced(written: str, expected: str) -> None:
    prompt = {"encoder_prompt": "audio", "decoder_prompt": {"prompt": written}}

    assert with_decoder_prompt(prompt, OWN) == {
        "encoder_prompt": "audio",
        "decoder_prompt": {"prompt": expected},
    }
    assert prompt["decoder_prompt"] == {"prompt": written}


def test_a_prompt_without_special_tokens_replaces_all_of_it() -> None:
    assert with_decoder_prompt({"decoder_prompt": USUAL}, "plain") == {
        "decoder_prompt": {"prompt": "plain"}
    }
