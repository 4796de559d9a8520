"""The executor of several ranks: which jobs go where, and when one has ended. No process here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from tests.diffusion.bench import request
from vllm_omni.diffusion.executor.jobs import (
    Broken,
    Decode,
    Job,
    Lane,
    Made,
    Prepare,
    Prepared,
    Preview,
    Previewed,
    Result,
    Step,
    Stepped,
)
from vllm_omni.diffusion.executor.process_per_rank import (
    ProcessPerRankExecutor,
    RankDiedError,
    RanksDifferError,
)
from vllm_omni.diffusion.executor.rank_wire import Drop, pack_result, unpack_order, unpack_result
from vllm_omni.engine.messages import StageFailure
from vllm_omni.generation.wire import RawFrame

FAILURE = StageFailure("out_of_memory", "stage dit has no memory for this request")


class FakeLink:
    """See `RankLink`: what ranks were sent, and what the test has them say."""

    def __init__(self, num_ranks: int = 2) -> None:
        self.num_ranks = num_ranks
        self.death: str | None = None
        self.sent: list[list[Job | Drop]] = [[] for _ in range(num_ranks)]
        self.said: list[tuple[int, Result]] = []

    def send(self, rank: int, message: list[RawFrame]) -> None:
        self.sent[rank].append(unpack_order(message))

    def take(self) -> Sequence[tuple[int, Result]]:
        said, self.said = self.said, []
        return said

    def figures(self) -> Mapping[str, float]:
        return {"num_ranks": self.num_ranks}

    def close(self) -> None:
        pass

    def says(self, rank: int, result: Result) -> None:
        self.said.append(unpack_result(pack_result(rank, result)))


@pytest.fixture
def link() -> FakeLink:
    return FakeLink()


@pytest.fixture
def executor(link: FakeLink) -> ProcessPerRankExecutor:
    return ProcessPerRankExecutor(link)


def prepare(executor: ProcessPerRankExecutor, link: FakeLink, request_id: str) -> None:
    executor.submit(Lane.MEDIA, Prepare(request(request_id)))
    for rank in range(link.num_ranks):
        link.says(rank, Prepared(request_id, "key", 0, 4))
    executor.take_results()


def drops(link: FakeLink) -> list[list[tuple[str, ...]]]:
    return [[one.request_ids for one in sent if isinstance(one, Drop)] for sent in link.sent]


def test_all_ranks_prepare_and_the_job_ends_with_the_last(
    executor: ProcessPerRankExecutor, link: FakeLink
) -> None:
    picture = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    mask = np.full((4, 4), 255, np.uint8)
    executor.submit(Lane.MEDIA, Prepare(request("a", images=(picture,), mask=mask, lora="soft")))
    link.says(1, Prepared("a", ((1, 2), "key"), 1, 4))
    assert executor.take_results() == []
    assert not executor.is_idle(Lane.MEDIA)
    link.says(0, Prepared("a", ((1, 2), "key"), 1, 4))

    assert executor.take_results() == [Prepared("a", "((1, 2), 'key')", 1, 4)]
    assert executor.is_idle(Lane.MEDIA)
    for [job] in link.sent:
        assert isinstance(job, Prepare)
        assert job.request.lora == "soft"
        assert np.array_equal(job.request.images[0], picture)
        assert job.request.mask is not None
        assert np.array_equal(job.request.mask, mask)


def test_a_request_that_one_rank_cannot_prepare_has_failed(
    executor: ProcessPerRankExecutor, link: FakeLink
) -> None:
    executor.submit(Lane.MEDIA, Prepare(request("a")))
    link.says(0, Prepared("a", "key", 0, 4))
    link.says(1, Prepared("a", failure=FAILURE))

    [result] = executor.take_results()
    assert isinstance(result, Prepared)
    assert result.failure == FAILURE
    executor.drop(["a"])
    assert drops(link) == [[("a",)], [("a",)]]


def test_the_last_rank_makes_the_pixels(executor: ProcessPerRankExecutor, link: FakeLink) -> None:
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    executor.submit(Lane.MEDIA, Preview("a"))
    link.says(1, Previewed("a", pixels))
    [preview] = executor.take_results()
    executor.submit(Lane.MEDIA, Decode("a"))
    link.says(1, Made("a", pixels))
    [made] = executor.take_results()

    assert link.sent == [[], [Preview("a"), Decode("a")]]
    assert isinstance(preview, Previewed)
    assert isinstance(made, Made)
    assert preview.pixels is not None
    assert made.pixels is not None
    assert np.array_equal(preview.pixels, pixels)
    assert np.array_equal(made.pixels, pixels)


def test_who_is_in_a_step_is_dropped_when_it_has_ended(
    executor: ProcessPerRankExecutor, link: FakeLink
) -> None:
    """A rank may not have begun the step yet: all must take it with the same members."""
    for name in "abc":
        prepare(executor, link, name)
    executor.submit(Lane.DENOISE, Step(("a", "b")))
    executor.drop(["a", "c", "never heard of"])
    assert drops(link) == [[("c",)], [("c",)]]

    link.says(0, Stepped(("a", "b")))
    executor.take_results()
    assert drops(link) == [[("c",)], [("c",)]]
    link.says(1, Stepped(("a", "b")))
    executor.take_results()
    assert drops(link) == [[("c",), ("a",)]] * 2
    executor.drop(["a", "c"])  # nothing is left of them
    assert drops(link) == [[("c",), ("a",)]] * 2


def test_who_is_being_prepared_is_dropped_when_it_is(
    executor: ProcessPerRankExecutor, link: FakeLink
) -> None:
    executor.submit(Lane.MEDIA, Prepare(request("a")))
    executor.drop(["a"])
    assert drops(link) == [[], []]
    for rank in range(2):
        link.says(rank, Prepared("a", "key", 0, 4))
    executor.take_results()
    executor.drop(["a"])

    assert drops(link) == [[("a",)], [("a",)]]


def test_ranks_that_do_not_agree_are_the_end(
    executor: ProcessPerRankExecutor, link: FakeLink
) -> None:
    executor.submit(Lane.DENOISE, Step(("a", "b")))
    link.says(0, Stepped(("a", "b"), {"a": FAILURE}))
    link.says(1, Stepped(("a", "b"), {"b": FAILURE}))
    executor.submit(Lane.MEDIA, Prepare(request("c")))
    link.says(0, Prepared("c", "key", 0, 4))
    link.says(1, Prepared("c", "key", 0, 5))

    results = executor.take_results()
    assert [type(one.error) for one in results if isinstance(one, Broken)] == [RanksDifferError] * 2


def test_failures_are_told_once_and_a_death_is_the_end(
    executor: ProcessPerRankExecutor, link: FakeLink
) -> None:
    executor.submit(Lane.DENOISE, Step(("a", "b")))
    for rank in range(2):
        link.says(rank, Stepped(("a", "b"), {"a": FAILURE}))
    assert executor.take_results() == [Stepped(("a", "b"), {"a": FAILURE})]

    link.death = "stage dit/0 rank 1 was killed by SIGKILL"
    [result] = executor.take_results()
    assert isinstance(result, Broken)
    assert isinstance(result.error, RankDiedError)
    assert "rank 1 was killed" in str(result.error)
    assert repr(executor) == "<ProcessPerRankExecutor ranks=2 busy=[]>"
