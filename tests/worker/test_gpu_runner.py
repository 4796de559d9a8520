"""Our hooks in vLLM's second model runner, with its parts that need a GPU left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_omni.config.pipeline import LAST_HIDDEN, CaptureScope
from vllm_omni.core.conditioning import REPETITION_KEY
from vllm_omni.core.token_streams import TARGETS_KEY
from vllm_omni.worker.capture import StateCapture
from vllm_omni.worker.conditioned_state import scheduled, stage_positions
from vllm_omni.worker.gpu_runner import StageGPURunner, has_sampled
from vllm_omni.worker.sent_rows import DueRows, SentRows

CPU = torch.device("cpu")


def batch(*parts: tuple[str, int, int, int]) -> Any:
    """Parts of (request, first position, count, tokens to be read before the next is sampled)."""
    ids, first, count, prefill = zip(*parts, strict=True)
    starts = np.cumsum([0, *count])
    return SimpleNamespace(
        req_ids=list(ids),
        idx_mapping_np=np.arange(len(ids))[::-1],  # rows of the state are not those of the batch
        num_computed_tokens_np=np.array(first),
        num_scheduled_tokens=np.array(count),
        prefill_len_np=np.array(prefill),
        query_start_loc_np=starts,
        num_tokens=int(starts[-1]),
        logits_indices=torch.from_numpy(starts[1:] - 1),
    )


@pytest.fixture
def runner() -> Any:
    made: Any = object.__new__(StageGPURunner)
    made.device = CPU
    made._capture = StateCapture([LAST_HIDDEN], CaptureScope.ALL)
    made._capture.allocate(num_blocks=8, block_size=4, width=1, dtype=torch.float32, device=CPU)
    made._sent = SentRows(CaptureScope.ALL)
    made._inputs = None
    made._asked, made._generators, made._codes = {}, {}, None
    made.model_state = SimpleNamespace(rope_state=None)
    table = torch.tensor([[5, 2], [1, 6]])
    made.block_tables = SimpleNamespace(block_tables=[SimpleNamespace(gpu=table)])
    return made


def new_request(request_id: str, num_tokens: int, **params: Any) -> Any:
    targets = {TARGETS_KEY: [["tcp://127.0.0.1:1", "r/states", True]]}
    return SimpleNamespace(
        req_id=request_id,
        prompt_token_ids=[0] * num_tokens,
        mm_features=[],
        sampling_params=SamplingParams(
            **{**params, "extra_args": targets | params.get("extra_args", {})}
        ),
    )


def test_a_request_that_reads_its_prompt_has_sampled_nothing() -> None:
    parts = ("a", 0, 4, 9), ("b", 8, 1, 9), ("c", 12, 1, 9)
    assert has_sampled(batch(*parts)).tolist() == [False, True, True]
    assert [part.first for part in scheduled(batch(*parts))] == [0, 8, 12]


def test_rows_of_a_step_lie_where_it_put_them(runner: Any) -> None:
    step = batch(("a", 4, 1, 3), ("b", 2, 1, 3), ("c", 7, 1, 3))
    of_step = torch.tensor([40, 41, 42])
    due = [DueRows(row, part, [[part.first, 1]], []) for row, part in enumerate(scheduled(step))]

    assert runner._slots(due, step, of_step) is of_step
    assert runner._slots(due[::2], step, of_step).tolist() == [40, 42]
    assert runner._slots([], step, of_step).tolist() == []


def test_rows_of_a_whole_prompt_are_found_by_the_blocks_of_its_request(runner: Any) -> None:
    step = batch(("a", 4, 1, 5), ("b", 3, 2, 5))
    parts = scheduled(step)
    due = [DueRows(0, parts[0], [[0, 1], [4, 1]], []), DueRows(1, parts[1], [[3, 2]], [])]

    # "a" has the second row of the table, "b" the first.
    assert runner._slots(due, step, torch.tensor([0, 1, 2])).tolist() == [4, 24, 23, 8]


def test_a_step_s_rows_ride_on_its_output(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step = batch(("other", 6, 1, 6), ("r", 0, 2, 2))
    runner._note(new_request("r", 2))
    runner.execute_model_state = SimpleNamespace(
        input_batch=step,
        hidden_states=torch.tensor([[7.0], [8.0], [9.0], [0.0]]),
        aux_hidden_states=None,
        slot_mappings_by_layer={"layer": torch.tensor([3, 20, 21, -1])},
    )

    def sampled(self: Any, grammar_output: object) -> Any:
        self.execute_model_state = None
        return SimpleNamespace(req_ids=step.req_ids, pooler_output=None)

    monkeypatch.setattr(GPUModelRunner, "sample_tokens", sampled)
    runner.block_tables.block_tables[0].gpu = torch.tensor([[5], [0]])

    output = runner.sample_tokens(None)

    first, (rows,) = output.pooler_output
    assert first is None
    assert rows.data.flatten().tolist() == [8.0, 9.0]
    assert rows.meta["spans"] == [[0, 2]]


def test_a_preempted_request_keeps_its_random_numbers(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[str] = []
    monkeypatch.setattr(GPUModelRunner, "finish_requests", lambda self, output: None)
    runner._inputs = SimpleNamespace(finish=forgotten.extend)
    runner._note(new_request("r", 2, seed=3, extra_args={REPETITION_KEY: 1.05}))
    assert runner._asked["r"].sampling_params.repetition_penalty == 1.05
    torch.rand(1, generator=runner._generators["r"])
    state = runner._generators["r"].get_state()

    runner.finish_requests(SimpleNamespace(finished_req_ids=set(), preempted_req_ids={"r"}))
    runner._note(new_request("r", 4, seed=3))
    assert torch.equal(runner._generators["r"].get_state(), state)

    runner.finish_requests(SimpleNamespace(finished_req_ids={"r"}, preempted_req_ids=set()))
    assert (runner._asked, runner._generators, forgotten) == ({}, {}, ["r"])


def test_what_the_model_makes_of_a_step_is_kept_for_those_who_sampled(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = batch(("a", 0, 2, 4), ("b", 4, 1, 4))
    kept: list[Any] = []
    heard: list[Any] = []

    def after_sampling(sampled: Any) -> Any:
        heard.append(sampled)
        return torch.tensor([[1, 2], [3, 4]]), torch.tensor([[0.5], [0.25]])

    runner._inputs = SimpleNamespace(keep=lambda base, places: kept.append(places))
    runner.model = SimpleNamespace(after_sampling=after_sampling)
    monkeypatch.setattr(
        GPUModelRunner,
        "sample",
        lambda *_: (SimpleNamespace(sampled_token_ids=torch.tensor([[9], [8]])), None, None),
    )
    for request_id, params in (("a", {"temperature": 0.0}), ("b", {"seed": 1})):
        runner._note(new_request(request_id, 4, **params))

    runner.sample(torch.tensor([[0.0], [1.0], [2.0]]), step, None)

    (sampled,) = heard
    assert sampled.hidden.flatten().tolist() == [1.0, 2.0]
    assert sampled.token_ids.tolist() == [9, 8]
    assert sampled.is_greedy == (True, False)
    assert [generator is None for generator in sampled.generators] == [True, False]
    assert kept == [[None, ("b", 5)]]
    assert runner._codes.tolist() == [[1, 2], [3, 4]]


def test_positions_count_on_after_a_prompt_with_media() -> None:
    staged: list[Any] = []
    rope: Any = SimpleNamespace(
        num_dims=3,
        prefill_delta=SimpleNamespace(np=np.zeros(4, dtype=np.int32)),
        prefill_positions=SimpleNamespace(stage_write=lambda *write: staged.append(write)),
    )
    positions = np.array([[0, 1, 1, 4], [0, 1, 2, 4], [0, 1, 3, 4]])

    stage_positions(rope, 2, positions, num_tokens=6)

    assert rope.prefill_delta.np.tolist() == [0, 0, 1, 0]
    assert staged == [
        (6, 0, [0, 1, 1, 4, 5, 6]),
        (7, 0, [0, 1, 2, 4, 5, 6]),
        (8, 0, [0, 1, 3, 4, 5, 6]),
    ]


@pytest.mark.parametrize(
    ("mode", "sizes"),
    [
        (CUDAGraphMode.FULL_AND_PIECEWISE, [64, 32, None]),
        (CUDAGraphMode.FULL_DECODE_ONLY, [64, 32, None]),
        (CUDAGraphMode.FULL, [2048, 32, None]),
    ],
)
def test_only_steps_of_decoding_are_split_for_graphs(
    runner: Any, mode: CUDAGraphMode, sizes: list[int | None]
) -> None:
    builders = [SimpleNamespace(max_cudagraph_size=size) for size in (2048, 32, None)]
    runner.attn_groups = [[SimpleNamespace(metadata_builders=builders)]]
    runner.compilation_config = SimpleNamespace(cudagraph_mode=mode)
    runner.max_num_reqs, runner.decode_query_len = 64, 1

    runner._split_attention_in_graphs_alone()

    assert [builder.max_cudagraph_size for builder in builders] == sizes
