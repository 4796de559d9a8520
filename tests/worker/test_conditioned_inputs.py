"""Inputs of a conditioned stage, with a model whose rows are numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_omni.core.conditioning import ConditionedPrompt, Conditioning, Rows
from vllm_omni.worker.conditioned_inputs import ConditionedInputs, Scheduled
from vllm_omni.worker.conditioned_model import SampledBatch


class NumberModel:
    """A row is one number; the constant condition is 1000."""

    row_width = 1
    rest = 1000.0

    def rows(self, rows: Rows) -> torch.Tensor:
        return torch.from_numpy(rows.data).float().unsqueeze(1)

    def rest_row(self) -> torch.Tensor:
        return torch.tensor([self.rest])

    def inputs(self, base: torch.Tensor, conditions: torch.Tensor) -> torch.Tensor:
        return base + conditions

    def warm_up(self, max_batch: int) -> None:
        raise NotImplementedError

    def after_sampling(self, batch: SampledBatch) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError


def numbers(*values: int) -> Rows:
    return Rows("number", np.array(values))


def begin(*conditions: int) -> Conditioning:
    base = [numbers(*(0 for _ in conditions))]
    return Conditioning(
        prompt=ConditionedPrompt(
            base=base, conditions=[numbers(*conditions)], token_ids=[0] * len(conditions)
        )
    )


@pytest.fixture
def model() -> NumberModel:
    return NumberModel()


@pytest.fixture
def inputs(model: NumberModel) -> ConditionedInputs:
    return ConditionedInputs(model, torch.float32, torch.device("cpu"))


def filled(inputs: ConditionedInputs, *batch: Scheduled) -> list[float]:
    buffer = torch.full((sum(part.count for part in batch) + 1, 1), -7.0)
    inputs.fill(buffer, batch)
    assert buffer[-1] == -7.0, "padding is not touched"
    return buffer[:-1].flatten().tolist()


def test_a_position_is_its_base_and_its_condition(inputs: ConditionedInputs) -> None:
    inputs.update([("a", begin(1, 2, 3)), ("a", Conditioning(steps=[numbers(4)]))])
    inputs.keep(torch.tensor([[50.0]]), [("a", 3)])

    assert filled(inputs, Scheduled("a", 0, 3)) == [1, 2, 3]
    assert filled(inputs, Scheduled("a", 3, 1)) == [54]


def test_what_many_requests_brought_is_made_rows_at_once_and_lies_where_it_belongs(
    model: NumberModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = ConditionedInputs(model, torch.float32, torch.device("cpu"))
    calls: list[tuple[str, int]] = []
    make = model.rows

    def counted(rows: Rows) -> torch.Tensor:
        calls.append((rows.kind, len(rows)))
        return make(rows)

    monkeypatch.setattr(model, "rows", counted)
    other = Rows("other", np.array([70]))
    updates = [(name, begin(i, i + 1)) for i, name in enumerate("abcd")]
    inputs.update([*updates, ("b", Conditioning(steps=[other, numbers(71)]))])
    assert sorted(calls) == [("number", 17), ("other", 1)]

    calls.clear()
    inputs.update([(name, Conditioning(steps=[numbers(90 + i)])) for i, name in enumerate("abcd")])
    assert calls == [("number", 4)]
    inputs.keep(torch.zeros(4, 1), [("a", 2), ("b", 4), ("c", 2), ("d", 2)])
    inputs.keep(torch.zeros(2, 1), [("b", 2), ("b", 3)])
    assert filled(inputs, Scheduled("a", 0, 3), Scheduled("d", 0, 3)) == [0, 1, 90, 3, 4, 93]
    assert filled(inputs, Scheduled("b", 0, 5), Scheduled("c", 0, 3)) == [
        1,
        2,
        70,
        71,
        91,
        2,
        3,
        92,
    ]


def test_after_the_last_condition_comes_the_constant_one(inputs: ConditionedInputs) -> None:
    inputs.update([("a", begin(1)), ("a", Conditioning(steps=[numbers(2)], is_last=True))])
    inputs.keep(torch.tensor([[10.0]]), [("a", 1)])
    inputs.keep(torch.tensor([[20.0]]), [("a", 2)])

    assert filled(inputs, Scheduled("a", 1, 1), Scheduled("a", 2, 1)) == [12, 1020]


def test_other_weights_have_another_constant_condition(
    inputs: ConditionedInputs, model: NumberModel
) -> None:
    inputs.update([("a", begin(1))])
    inputs.keep(torch.tensor([[10.0]]), [("a", 1)])

    model.rest = 2000.0
    inputs.take_weights()

    assert filled(inputs, Scheduled("a", 1, 1)) == [2010]


def test_a_recomputed_request_is_fed_the_same_again(inputs: ConditionedInputs) -> None:
    inputs.update([("a", begin(1, 2)), ("a", Conditioning(steps=[numbers(3, 4)]))])
    for position, base in ((2, 10.0), (3, 20.0)):
        inputs.keep(torch.tensor([[base]]), [("a", position)])
    once = filled(inputs, Scheduled("a", 0, 4))

    assert filled(inputs, Scheduled("a", 0, 4)) == once == [1, 2, 13, 24]


def test_requests_it_does_not_know_keep_their_inputs(inputs: ConditionedInputs) -> None:
    inputs.update([("a", begin(1, 2))])

    assert filled(inputs, Scheduled("plain", 0, 2), Scheduled("a", 0, 2)) == [-7, -7, 1, 2]


def test_rows_that_are_filled_are_no_token_ids(inputs: ConditionedInputs) -> None:
    inputs.update([("a", begin(1, 2))])
    is_token_id = np.ones(5, dtype=bool)
    inputs.disclaim(is_token_id, [Scheduled("b", 0, 1), Scheduled("a", 0, 2), Scheduled("c", 0, 1)])
    assert is_token_id.tolist() == [True, False, False, True, True]


def test_what_was_not_sampled_is_not_kept(inputs: ConditionedInputs) -> None:
    inputs.update([("a", begin(1, 2)), ("b", begin(3))])
    inputs.keep(torch.tensor([[10.0], [20.0], [30.0]]), [None, ("b", 1), ("plain", 4)])

    assert filled(inputs, Scheduled("a", 0, 2), Scheduled("b", 1, 1)) == [1, 2, 1020]


def test_a_request_that_ends_leaves_nothing(inputs: ConditionedInputs) -> None:
    inputs.update([("a", begin(1, 2))])
    inputs.finish(["a", "unknown"])

    assert repr(inputs) == "<ConditionedInputs requests=0 <RowPool pages=64 free=64>>"
