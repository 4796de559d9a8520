"""What is said is what the text says, without its markup."""

from __future__ import annotations

import pytest

from vllm_omni.model_executor.models.smol_voice.speakable import speakable


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("Plain words, 3.50 dollars; 50% of A & B!", "Plain words, 3.50 dollars; 50% of A & B!"),
        ("This is **very** _important_ and `code`.", "This is very important and code."),
        ("# Heading\n", "Heading."),
        ("- an item\n", "an item."),
        ("> quoted\n", "quoted."),
        ("See [the docs](https://example.com/a_b) now.", "See the docs now."),
        ("![a cat](cat.png) sleeps", "a cat sleeps"),
        ("Great job \U0001f600\U0001f44d\U0001f3fd!", "Great job!"),
        ("```python\n", ""),
        ("```\nDone.", "Done."),
        ("---\n", ""),
        ("| a | b |\n", "a, b."),
        ("|---|---|\n", ""),
        ("<b>bold</b><br/>", "bold"),
        ("a < b and c > d", "a < b and c > d"),
        ("2 * 3 is 6", "2 times 3 is 6"),
        ("snake_case_name", "snake case name"),
        ("Tom &amp; Jerry", "Tom & Jerry"),
        ("\u201cQuoted\u201d isn\u2019t odd", '"Quoted" isn\'t odd'),
        ("text<|im_end|>", "text"),
        ("one\x00two\x1b three", "one two three"),
        ("&#1;", ""),
        ("Go to https://example.com today", "Go to example.com today"),
        ("...", ""),
        ("", ""),
        (" \n\t ", ""),
        ("Is it?\n", "Is it?"),
        ("Shopping list:\n", "Shopping list:"),
    ],
)
def test_markup_is_not_said(written: str, said: str) -> None:
    assert speakable(written) == said


def test_espeaks_own_phoneme_marks_cannot_be_written() -> None:
    assert "[[" not in speakable("say [[h@'loU]] please")
