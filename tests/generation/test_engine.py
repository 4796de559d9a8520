"""The one-shot engine's decisions: who shares a forward, and whose failure is whose."""

from __future__ import annotations

import pytest

from tests.generation.bench import Bench
from tests.generation.tone import spoken
from vllm_omni.generation import request as request_module
from vllm_omni.generation.engine import MAX_FAILED_IN_A_ROW
from vllm_omni.generation.request import END_GRACE_S
from vllm_omni.inputs.prompt import OmniPrompt


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_work_that_is_ready_shares_a_forward(bench: Bench) -> None:
    for name in ("a", "b", "c"):
        bench.say(name, f"{name}1 {name}2")
    bench.run()

    assert bench.model.batches == [["a1", "b1", "c1"], ["a2", "b2", "c2"]]
    assert bench.model.last == [False] * 3 + [True] * 3


def test_a_long_request_does_not_hold_up_short_ones() -> None:
    bench = Bench(max_batch_size=2)
    bench.say("long", "l1 l2 l3 l4")
    for name in ("a", "b", "c"):
        bench.say(name, name)
    bench.run()

    assert bench.model.batches == [["l1", "a"], ["b", "c"], ["l2"], ["l3"], ["l4"]]


def test_eight_together_give_what_each_gives_alone(bench: Bench) -> None:
    texts = {f"r{i}": " ".join(f"word{i * j}" for j in range(i + 1)) for i in range(8)}
    for request_id, text in texts.items():
        bench.say(request_id, text)
    bench.run()

    assert bench.pcm == {request_id: spoken(text) for request_id, text in texts.items()}
    assert bench.model.live_states == 0


def test_the_exception_of_one_item_fails_its_request_alone(bench: Bench) -> None:
    bench.say("good", "one two")
    bench.say("bad", "one !raise two")
    bench.run()

    assert bench.failure("bad") == (
        "request_failed",
        "stage voice failed: ValueError: cannot say !raise",
    )
    assert bench.pcm["good"] == spoken("one two")
    assert bench.ended["good"].failure is None


def test_a_batch_that_fails_runs_one_by_one(bench: Bench) -> None:
    bench.say("a", "one")
    bench.say("b", "!batch")
    bench.say("c", "three")
    bench.run()

    assert bench.model.batches == [["one", "!batch", "three"], ["one"], ["!batch"], ["three"]]
    assert bench.pcm["c"] == spoken("three")
    assert all(output.failure is None for output in bench.ended.values())


def test_samples_that_are_not_numbers_fail_their_request(bench: Bench) -> None:
    bench.say("good", "one")
    bench.say("bad", "!nan")
    bench.run()

    assert "NaN" in bench.failure("bad")[1]
    assert bench.pcm == {"good": spoken("one")}


def test_a_wrong_number_of_results_fails_no_neighbour(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = bench.model.forward
    monkeypatch.setattr(
        bench.model, "forward", lambda batch: forward(batch) if len(batch) == 1 else []
    )
    bench.say("a", "one")
    bench.say("b", "two")
    bench.run()

    assert bench.pcm == {"a": spoken("one"), "b": spoken("two")}


def test_a_prompt_that_cannot_start_fails_with_its_field(bench: Bench) -> None:
    bench.engine.add("bad", OmniPrompt(token_ids=[1]), None)
    bench.run()

    failure = bench.ended["bad"].failure
    assert failure is not None
    assert (failure.code, failure.field) == ("invalid_request", "input")


def test_nothing_to_say_ends_the_request_without_audio(bench: Bench) -> None:
    bench.say("empty", "")
    bench.listen("silent", "s")
    bench.receiver.end("s")
    bench.run()

    assert {i: (o.audio, o.failure) for i, o in bench.ended.items()} == {
        "empty": (None, None),
        "silent": (None, None),
    }


def test_a_last_input_without_audio_still_ends_the_request(bench: Bench) -> None:
    bench.say("a", "one !nothing")
    bench.run()

    assert bench.ended["a"].audio is None
    assert bench.pcm["a"] == spoken("one")


def test_the_model_starts_while_the_stream_still_runs(bench: Bench) -> None:
    bench.listen("a", "s")
    bench.receiver.send("s", "hello wor")
    bench.run()
    assert bench.pcm["a"] == spoken("hello")

    bench.receiver.send("s", "ld again")
    bench.receiver.end("s")
    bench.run()

    assert bench.pcm["a"] == spoken("hello world again")
    assert bench.ended["a"].failure is None
    assert bench.model.last == [False, False, True]
    assert bench.num_wakes == 3


@pytest.mark.parametrize("size", [1, 2, 3, 7, 25])
def test_a_stream_cut_anywhere_gives_the_same_audio(bench: Bench, size: int) -> None:
    text = "the quick brown fox jumps over it"
    bench.listen("a", "s")
    for begin in range(0, len(text), size):
        bench.receiver.send("s", text[begin : begin + size])
        bench.step()
    bench.receiver.end("s")
    bench.run()

    assert bench.pcm["a"] == spoken(text)


@pytest.mark.parametrize(
    ("reason", "error", "expected"),
    [
        ("error", "no memory", ("request_failed", ", which failed: no memory")),
        ("abort", "", ("request_failed", ", which stopped writing")),
        ("lost", "stage thinker/0 is gone", ("replica_died", ": stage thinker/0 is gone")),
        (
            "broken",
            "frame 11 arrived where 10 was due",
            ("request_failed", ": frame 11 arrived where 10 was due"),
        ),
    ],
)
def test_a_stream_that_fails_fails_its_request_and_says_who_waited_for_what(
    bench: Bench,
    caplog: pytest.LogCaptureFixture,
    reason: str,
    error: str,
    expected: tuple[str, str],
) -> None:
    bench.listen("a", "s")
    bench.receiver.send("s", "hello ")
    bench.receiver.end("s", reason, error)
    bench.run()

    waited = "stage voice waited for the next chunk of the stream of stage thinker"
    assert bench.failure("a") == (expected[0], waited + expected[1])
    assert bench.model.live_states == 0
    (record,) = caplog.records
    assert (record.levelname, record.exc_info) == ("WARNING", None), "no fault of this stage"
    assert expected[1] in record.getMessage()


def test_a_bridge_that_fails_fails_its_request_alone(bench: Bench) -> None:
    bench.listen("bad", "s")
    bench.say("good", "one")
    bench.receiver.send("s", "!bridge")
    bench.run()

    assert "this bridge does not take that" in bench.failure("bad")[1]
    assert bench.receiver.cancelled == ["s"]
    assert bench.pcm["good"] == spoken("one")


def test_frames_beyond_what_the_model_needs_keep_their_credit(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_module, "MAX_READY_INPUTS", 2)
    bench.listen("a", "s")
    for _ in range(10):
        bench.receiver.send("s", "word ")
    bench.step()
    assert bench.receiver.num_released == 3

    bench.receiver.end("s")
    bench.run()
    assert bench.pcm["a"] == spoken("word " * 10)
    assert bench.receiver.num_released == 10


def test_an_abort_gives_the_credit_of_unread_frames_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_module, "MAX_READY_INPUTS", 1)
    bench.listen("a", "s")
    for _ in range(5):
        bench.receiver.send("s", "word ")
    bench.step()
    bench.engine.abort(["a"])

    assert bench.receiver.num_released == 5


def test_an_abort_frees_the_request_and_its_frames(bench: Bench) -> None:
    bench.listen("a", "s")
    bench.say("b", "one two three")
    bench.receiver.send("s", "hello ")
    bench.step()
    bench.engine.abort(["a", "b", "unknown"])
    bench.receiver.send("s", "late ")
    bench.run()

    assert bench.ended == {}
    assert bench.receiver.cancelled == ["s"]
    assert bench.receiver.num_released == 2
    assert repr(bench.engine) == "<OneShotEngine voice requests=0 ready=0>"
    assert bench.model.live_states == 0


def test_a_deadline_ends_the_request_and_says_what_it_waited_for(bench: Bench) -> None:
    bench.listen("waits", "s", deadline_s=5.0)
    bench.say("queued", "one two", deadline_s=9.0)
    bench.now = 4.0
    assert bench.engine.next_deadline_s == 5.0
    bench.step()
    assert not bench.ended
    bench.now = 9.0
    bench.step()

    code, text = bench.failure("waits")
    assert code == "deadline_exceeded"
    assert text == (
        "stage voice: the deadline passed while waiting for the first chunk or the end of the "
        "stream of stage thinker"
    )
    assert bench.failure("queued")[1].endswith("waiting for its turn")


def test_an_end_that_does_not_come_after_its_stage_has_finished_is_lost(bench: Bench) -> None:
    bench.listen("a", "s", deadline_s=600.0)
    bench.receiver.send("s", "hello ")
    bench.engine.source_ended("a", "s")
    bench.run()
    bench.now = END_GRACE_S - 0.1
    assert bench.engine.next_deadline_s == END_GRACE_S
    bench.step()
    assert not bench.ended
    bench.now = END_GRACE_S
    bench.step()

    assert bench.failure("a") == (
        "request_failed",
        "stage voice waited 5 s for the next chunk or the end of the stream of stage thinker, "
        "which has finished writing",
    )
    assert bench.receiver.cancelled == ["s"]


def test_chunks_that_are_still_on_their_way_are_waited_for(bench: Bench) -> None:
    bench.listen("a", "s", deadline_s=600.0)
    bench.engine.source_ended("a", "s")
    for _ in range(10):
        bench.now += END_GRACE_S - 0.1
        bench.receiver.send("s", "word ")
        bench.run()
    bench.receiver.end("s")
    bench.run()

    assert bench.ended["a"].failure is None
    assert bench.pcm["a"] == spoken("word " * 10)


def test_the_end_of_a_source_is_news_only_to_its_readers(bench: Bench) -> None:
    bench.listen("a", "s", deadline_s=600.0)
    bench.engine.source_ended("unknown", "s")
    bench.engine.source_ended("a", "another")
    bench.now = 100.0
    bench.step()

    assert not bench.ended
    assert bench.engine.next_deadline_s == 600.0


def test_a_model_that_only_fails_has_to_pass_its_test_again(bench: Bench) -> None:
    for i in range(MAX_FAILED_IN_A_ROW):
        assert bench.model.num_self_tests == 0
        bench.say(f"r{i}", "!raise")
        bench.run()

    assert bench.model.num_self_tests == 1


def test_a_success_in_between_clears_the_model(bench: Bench) -> None:
    for i in range(MAX_FAILED_IN_A_ROW):
        bench.say(f"bad{i}", "!raise")
        bench.run()
        bench.say(f"good{i}", "one")
        bench.run()

    assert bench.model.num_self_tests == 0


def test_an_id_that_runs_already_leaves_the_first_alone(bench: Bench) -> None:
    bench.say("a", "one")
    bench.say("a", "two")
    bench.run()

    assert bench.pcm["a"] == spoken("one")
