"""What a diffusion replica's heartbeat says of its loop and of its lanes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.diffusion.bench import Bench
from tests.diffusion.replicas import stripe_spec
from vllm_omni.diffusion.proc import DiffusionReplica
from vllm_omni.generation.report_stream import ReportReader


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[DiffusionReplica]:
    path = str(tmp_path / "reports")
    reader = ReportReader(path)
    replica = DiffusionReplica(stripe_spec(), "inproc://commands", path)
    yield replica
    replica.close()
    reader.close()


def test_an_idle_replica_has_nothing_to_do_and_a_loop_that_hangs_has(
    replica: DiffusionReplica,
) -> None:
    replica.engine = Bench().engine
    replica._is_asleep = True
    assert replica.figures()["num_runnable"] == 0
    replica._is_asleep = False  # it took up a command, and does not come back

    before = replica.figures()
    assert before["num_runnable"] == 1
    assert replica.figures()["progress"] == before["progress"]


def test_work_in_the_lanes_is_what_counts(replica: DiffusionReplica) -> None:
    bench = Bench()
    replica.engine = bench.engine
    bench.add("a", num_inference_steps=50)
    bench.turn(3)

    figures = replica.figures()
    assert figures["num_runnable"] == 1
    bench.turn()
    assert replica.figures()["progress"] > figures["progress"]
