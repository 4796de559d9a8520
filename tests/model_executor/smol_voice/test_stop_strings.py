"""A stop string ends the text wherever the chunks are cut."""

from __future__ import annotations

import pytest

from vllm_omni.model_executor.models.smol_voice.stop_strings import StopStrings


def passed(text: str, stop: list[str], chunk: int, *, include: bool = False) -> str:
    stops = StopStrings(stop, include=include)
    out = "".join(stops.feed(text[i : i + chunk]) for i in range(0, len(text), chunk))
    return out + stops.end()


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 25])
def test_text_ends_before_the_stop_string(chunk: int) -> None:
    assert passed("one two STOP three", ["STOP"], chunk) == "one two "
    assert passed("one two STOP three", ["STOP"], chunk, include=True) == "one two STOP"


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 25])
def test_the_earliest_of_several_counts(chunk: int) -> None:
    assert passed("a b c d", ["d", "c", "zzzz"], chunk) == "a b "


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 25])
def test_a_beginning_of_a_stop_string_is_not_lost(chunk: int) -> None:
    assert passed("ends with STO", ["STOP"], chunk) == "ends with STO"


def test_text_that_may_be_a_stop_string_is_held_back() -> None:
    stops = StopStrings(["STOP"], include=False)

    assert stops.feed("go STO") == "go "
    assert stops.feed("RE") == "ST"


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert StopStrings([], include=False).feed("abc") == "abc"
