"""Tokens before a stop string, with a vocabulary of one token for each word and sign."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from vllm_omni.model_executor.models.common.stop_guard import StopGuard

WORDS = ["I", " am", " here", ".", " Bye", "!", "END", "E", "ND"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "I"))
    tokenizer.decoder = decoders.Fuse()
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def spoken(folder: Path, words: list[str], *stop: str, include: bool = False) -> list[int]:
    """How many tokens may be spoken after each one, and at the end."""
    guard = StopGuard(
        {"tokenizer_dir": str(folder), "stop": stop, "include_stop_str_in_output": include}
    )
    return [*(guard.feed([WORDS.index(word)]) for word in words), guard.end()]


def test_without_stop_strings_every_token_goes_at_once() -> None:
    assert StopGuard({}).feed([1, 2, 3]) == 3


def test_what_comes_after_a_stop_string_is_not_spoken(folder: Path) -> None:
    assert spoken(folder, ["I", " am", ".", " Bye", "!"], ".") == [1, 1, 0, 0, 0, 0]


def test_tokens_that_may_begin_a_stop_string_wait(folder: Path) -> None:
    assert spoken(folder, ["I", " here", "E", "ND", "!"], "END") == [0, 2, 0, 0, 0, 0]


def test_what_was_no_stop_string_is_spoken_after_all(folder: Path) -> None:
    assert spoken(folder, ["I", " here", "E", "!"], "END") == [0, 2, 0, 0, 2]
    assert spoken(folder, ["I", "E"], "END") == [0, 0, 2]


def test_a_stop_string_that_belongs_to_the_text_is_spoken(folder: Path) -> None:
    assert spoken(folder, ["I", "END", " Bye"], "END", include=True) == [0, 2, 0, 0]
