"""Events with media are the JSON that `json` would write."""

from __future__ import annotations

import base64
import json

import pytest

from vllm_omni.entrypoints.openai.events import MediaEvents


@pytest.mark.parametrize("data", [b"", b"a", bytes(range(256)) * 3])
@pytest.mark.parametrize("id_", ["audio_1", 'a "data": "" b', "ü\n\\"])
def test_an_event_is_what_json_makes_of_it(data: bytes, id_: str) -> None:
    def value(text: str) -> dict[str, object]:
        return {"id": id_, "choices": [{"delta": {"audio": {"id": id_, "data": text}}}]}

    event = MediaEvents(value(""), "data").event(data)

    expected = json.dumps(value(base64.b64encode(data).decode()))
    assert event == f"data: {expected}\n\n".encode()
