"""What the probes note, and how it is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import request_probe
from benchmarks.first_audio import report, steps_of
from benchmarks.request_probe import read_notes


class Replica:
    """Something whose methods are noted."""

    def add(self, request_id: str) -> str:
        return f"{request_id} added"


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str, str]]:
    noted: list[tuple[int, str, str]] = []
    monkeypatch.setattr(request_probe, "_notes", noted)
    monkeypatch.setattr(request_probe, "_seen", set())
    return noted


def test_a_request_is_noted_once_at_a_place_and_others_are_not(
    notes: list[tuple[int, str, str]],
) -> None:
    request_probe.note("there", "chatcmpl-probe.8.1.3-2a/0.0-f00", "chatcmpl-other-1")
    request_probe.note("there", "probe.8.1.3")
    request_probe.note("begun", "probe.8.1.3")

    assert [(place, name) for _, place, name in notes] == [
        ("there", "probe.8.1.3"),
        ("begun", "probe.8.1.3"),
    ]


def test_a_wrapped_method_does_what_it_did(
    notes: list[tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Replica, "add", Replica.add)  # put back afterwards
    request_probe._wrap(Replica, "add", lambda _, request_id: request_probe.note("in", request_id))

    assert Replica().add("probe.1.1.0") == "probe.1.1.0 added"
    assert len(notes) == 1


def test_notes_of_all_processes_are_read(tmp_path: Path) -> None:
    for pid, note in enumerate([(5, "a", "probe.1.0.0"), (7, "b", "probe.1.0.0")]):
        (tmp_path / str(pid)).write_text(json.dumps(note) + "\n")

    assert sorted(read_notes(tmp_path)) == [(5, "a", "probe.1.0.0"), (7, "b", "probe.1.0.0")]


def test_medians_are_after_the_sending_and_steps_are_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = "thinker: begun"
    one = {f"probe.3.1.{i}": {"sent": 100.0 + i, place: 130.0} for i in range(2)}
    one["probe.3.1.2"] = {"sent": 100.0, place: 150.0}

    assert steps_of(one, place) == [2, 1]
    assert report(3, [one])["median_ms"] == {place: 30.0}
    assert "[[2, 1]]" in capsys.readouterr().out
