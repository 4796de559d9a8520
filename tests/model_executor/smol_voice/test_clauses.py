"""Text is cut where a voice may breathe, and only there."""

from __future__ import annotations

import random

import pytest

from vllm_omni.model_executor.models.smol_voice import clauses
from vllm_omni.model_executor.models.smol_voice.clauses import ClauseCutter, CutRules

TEXTS = [
    "The capital of France is Paris.",
    "Well, I think so. Dr. Smith paid 3.50 dollars on Jan. 5, 2024, e.g. for U.S. goods. Fine!",
    "Sure! Here is a list:\n\n1. **Apples**: red, tasty\n2. Pears\n\n```py\nprint(1)\n```\nDone.",
    'She said "Stop!" and left. "Why?" he asked... nobody knew; it was 10:30 p.m. already.',
    "No. 5 is alive. No. Never again! OK? Yes. It is 1,000,000.00 more, i.e. a lot\u2014really.",
    "word " * 120,
    "x" * 700,
    "   \n\n  ...  !?  \n",
    "",
]


def cut(text: str, chunk: int, rules: CutRules | None = None) -> list[str]:
    cutter = ClauseCutter(rules)
    pieces = []
    for start in range(0, len(text), chunk):
        pieces += cutter.feed(text[start : start + chunk])
    return pieces + cutter.end()


class CountedMarks(str):
    """Characters that count how often they are asked for."""

    num_asked = 0

    def __contains__(self, char: str) -> bool:
        CountedMarks.num_asked += 1
        return super().__contains__(char)


@pytest.mark.parametrize("chunk", [1, 20_000])
@pytest.mark.parametrize("text", ["." * 20_000, '."' * 10_000, ". " * 10_000, "...\n" * 5_000])
def test_marks_in_a_row_are_looked_over_once(
    text: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clauses, "_SENTENCE_ENDS", CountedMarks(clauses._SENTENCE_ENDS))
    CountedMarks.num_asked = 0
    cut(text, chunk)

    assert len(text) <= CountedMarks.num_asked < 5 * len(text)


@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_joined_are_the_text(text: str) -> None:
    assert "".join(cut(text, 1)) == text


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 25])
def test_the_cut_does_not_depend_on_the_chunks(text: str, chunk: int) -> None:
    assert cut(text, chunk) == cut(text, 10_000)


def test_the_cut_of_random_text_does_not_depend_on_the_chunks() -> None:
    rng = random.Random(7)
    alphabet = ["a", "B", "word", " ", " ", "\n", ".", ",", ";", "!", "?", "5", "...", '"', "Dr."]
    for _ in range(200):
        text = "".join(rng.choices(alphabet, k=rng.randrange(120)))
        whole = cut(text, 10_000)
        assert "".join(whole) == text
        for chunk in (1, 2, 3, 7, 25):
            assert cut(text, chunk) == whole, text


def test_the_first_piece_ends_at_the_first_clause_that_says_something() -> None:
    text = "As far as I know, the capital of France is Paris, a city on the Seine."

    assert cut(text, 3)[0] == "As far as I know, "


def test_a_short_opening_waits_for_more() -> None:
    assert cut("Well, this is how it is.", 4) == ["Well, this is how it is."]


def test_later_pieces_are_sentences() -> None:
    text = "First of all, hello. Then there is this, and that, and more. And the end of it all."

    assert cut(text, 5) == [
        "First of all, ",
        "hello. Then there is this, and that, and more. ",
        "And the end of it all.",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "It costs 3.50 dollars in total.",
        "There are 1,000,000 of them.",
        "Dr. Smith and Mrs. Jones met Mr. Brown.",
        "He lives in the U.S. Army base.",
        "Use fruit, e.g. Apples, for it.",
        "Look at example.com/index.html for it.",
        "We meet at 10:30 today.",
        "1. Apples",
        "J. R. R. Tolkien wrote it.",
        "This is No. 5 of them.",
    ],
)
def test_numbers_abbreviations_and_names_are_not_cut(text: str) -> None:
    rules = CutRules(first_min_clause=1000)

    assert cut(text, 2, rules) == [text]


def test_a_line_ends_a_piece() -> None:
    assert cut("- Apples\n- Pears\n", 3) == ["- Apples\n", "- Pears\n"]


def test_a_text_without_an_end_is_cut_between_words() -> None:
    rules = CutRules()
    pieces = cut("word " * 200, 9)

    assert len(pieces[0]) <= rules.first_max
    assert all(len(piece) <= rules.max_piece for piece in pieces)
    assert all(piece.endswith("word ") for piece in pieces)


def test_a_word_without_an_end_is_cut_all_the_same() -> None:
    assert max(len(piece) for piece in cut("x" * 5000, 100)) <= CutRules().max_piece


def test_a_piece_comes_as_soon_as_it_is_certain() -> None:
    cutter = ClauseCutter()

    assert cutter.feed("Paris is the capital.") == []  # "3." may go on with "5"
    assert cutter.feed(" It") == ["Paris is the capital. "]
