"""What a replica reports when its client cannot be told everything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.generation.replicas import tone_spec
from tests.generation.tone import ToneModel
from vllm_omni.engine.messages import StageOutput
from vllm_omni.generation import report_stream, wire
from vllm_omni.generation.model import ModelContext
from vllm_omni.generation.proc import OneShotReplica
from vllm_omni.generation.report_stream import ReportReader
from vllm_omni.inputs.prompt import OmniPrompt
from vllm_omni.outputs.media import AudioChunk


@dataclass
class Rig:
    replica: OneShotReplica
    reader: ReportReader

    def outputs(self) -> list[StageOutput]:
        """All that was reported."""
        outputs: list[StageOutput] = []
        for frames in self.reader.receive() or ():
            report = wire.decode_report(frames[0])
            assert isinstance(report, wire.Outputs)
            outputs += wire.unpack_outputs(report, frames)
        return outputs


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    path = str(tmp_path / "reports")
    reader = ReportReader(path)
    model = ToneModel(ModelContext(model_dir=tmp_path, device="cpu", num_threads=1))
    replica = OneShotReplica(tone_spec(has_sources=False), model, None, "inproc://loop", path)
    reader.accept()
    yield Rig(replica, reader)
    replica.close()
    reader.close()


def test_a_result_that_is_too_long_fails_its_request_alone(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_stream, "MAX_REPORT_BYTES", 1000)
    rig.replica.engine.add("long", OmniPrompt(text="goes on"), None)
    small = AudioChunk(b"\1\2", 8000)
    rig.replica._report(
        [StageOutput("long", audio=AudioChunk(bytes(2000), 8000)), StageOutput("a", audio=small)]
    )

    long, other = rig.outputs()
    assert long.finished
    assert long.failure is not None
    assert long.failure.code == "request_failed"
    assert long.failure.message.startswith("stage voice: ")
    assert "more than the 1000 that can be sent" in long.failure.message
    assert other == StageOutput("a", audio=small)
    assert len(rig.replica.engine) == 0


def test_while_the_client_is_behind_the_loop_sleeps_and_is_not_taken_for_hung(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = rig.replica
    replica.engine.add("a", OmniPrompt(text="one"), None)
    assert replica._wait_ms() == 0
    monkeypatch.setattr(report_stream, "MAX_UNSENT_REPORTS", 0)
    replica._is_asleep = True

    assert replica._wait_ms() is None
    assert replica.figures()["num_runnable"] == 0
