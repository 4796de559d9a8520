"""From text to phoneme ids, in Piper's conventions. Runs in the voice's replica.

espeak-ng's phonemes come from the package `piper-tts`, which is GPL-3: it is imported here only,
only when a voice asks for it, and is not a dependency of this package.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from vllm_omni.errors import ConfigError

_START, _END, _BETWEEN = "^", "$", "_"


class Phonemizer(Protocol):
    """Text to phonemes, one list for each sentence."""

    def __call__(self, text: str) -> list[list[str]]: ...


class CharacterPhonemizer:
    """Every character is a phoneme: for voices without a pronunciation model."""

    def __call__(self, text: str) -> list[list[str]]:
        return [list(unicodedata.normalize("NFD", text))]


class EspeakPhonemizer:
    """espeak-ng, by way of piper-tts. Its state is the process's: use one per process."""

    def __init__(self, voice: str) -> None:
        try:
            from piper.phonemize_espeak import EspeakPhonemizer as Espeak
        except ImportError as error:
            raise ConfigError(
                "this voice needs piper-tts (GPL-3.0-or-later) for its phonemes: "
                "run `pip install 'vllm-omni[demo]'`"
            ) from error
        self._espeak = Espeak()
        self._voice = voice

    def __call__(self, text: str) -> list[list[str]]:
        sentences: list[list[str]] = self._espeak.phonemize(self._voice, text)
        return sentences


def make_phonemizer(kind: str, espeak_voice: str) -> Phonemizer:
    """The phonemizer that a voice's settings name.

    Raises:
        ConfigError: it is not known, or its package is not installed.
    """
    if kind == "espeak":
        return EspeakPhonemizer(espeak_voice)
    if kind == "text":
        return CharacterPhonemizer()
    raise ConfigError(f"the voice's phoneme_type is {kind!r}; known: espeak, text")


def phoneme_ids(phonemes: Iterable[str], ids_by_phoneme: Mapping[str, Sequence[int]]) -> list[int]:
    """Ids of one sentence as the network takes them: a mark between any two phonemes, and around
    them a start and an end. Phonemes that the voice does not know are left out."""
    between = ids_by_phoneme[_BETWEEN]
    ids = [*ids_by_phoneme[_START], *between]
    for phoneme in phonemes:
        known = ids_by_phoneme.get(phoneme)
        if known:
            ids += [*known, *between]
    return [*ids, *ids_by_phoneme[_END]]
