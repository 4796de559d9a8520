"""Modulations from tables: what the blocks read is what they would have projected."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from diffusers import FluxTransformer2DModel, QwenImageTransformer2DModel

from vllm_omni.diffusion.accelerations import modulation
from vllm_omni.diffusion.accelerations.modulation import Modulations, Table, Wanted

NUM_STEPS = 5
TIMES = torch.linspace(1.0, 0.1, NUM_STEPS)


def flux() -> FluxTransformer2DModel:
    torch.manual_seed(0)
    return FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=8,
        pooled_projection_dim=6,
        axes_dims_rope=(2, 2, 4),
    ).eval()


def run(transformer: FluxTransformer2DModel, times: torch.Tensor) -> torch.Tensor:
    """A row for each of the times."""
    generator = torch.Generator().manual_seed(len(times))
    (output,) = transformer(
        hidden_states=torch.randn(len(times), 4, 4, generator=generator),
        timestep=times,
        pooled_projections=pooled(transformer).expand(len(times), -1),
        encoder_hidden_states=torch.randn(len(times), 3, 8, generator=generator),
        txt_ids=torch.zeros(3, 3),
        img_ids=torch.zeros(4, 3),
        return_dict=False,
    )
    return output


def pooled(transformer: FluxTransformer2DModel) -> torch.Tensor:
    return torch.linspace(-1, 1, transformer.config.pooled_projection_dim)[None]


def embedder(transformer: FluxTransformer2DModel) -> Callable[[int, int], torch.Tensor]:
    def embed(start: int, end: int) -> torch.Tensor:
        rows = pooled(transformer).expand(end - start, -1)
        return transformer.time_text_embed.forward(TIMES[start:end] * 1000, rows)

    return embed


def looked_up(transformer: FluxTransformer2DModel, max_rows: int = 2) -> Modulations:
    return Modulations(
        transformer, transformer.time_text_embed, max_rows=max_rows, max_tables=max_rows
    )


def count_projections(transformer: FluxTransformer2DModel) -> list[int]:
    """Rows of each call of one projection."""
    rows: list[int] = []
    projection = transformer.single_transformer_blocks[0].norm.linear.projection
    projection.register_forward_pre_hook(lambda module, given: rows.append(len(given[0])))
    return rows


@torch.inference_mode()
def test_members_at_different_steps_read_their_rows_and_projections_run_once_per_window() -> None:
    transformer = flux()
    reference = copy.deepcopy(transformer)
    modulations = looked_up(transformer)
    modulations.window = 3
    rows = count_projections(transformer)
    tables, embed = [Table(), Table()], embedder(transformer)

    def step(steps: list[int]) -> None:
        wanted = [
            Wanted(table, i, NUM_STEPS, embed) for table, i in zip(tables, steps, strict=True)
        ]
        with modulations.announced(wanted):
            given = run(transformer, TIMES[steps])
        torch.testing.assert_close(given, run(reference, TIMES[steps]), atol=1e-6, rtol=0)

    for steps in ([0, 1], [1, 2], [2, 3]):
        step(steps)
    assert rows == [6]  # both tables at once, three steps of each
    step([3, 4])
    assert rows == [6, 3]  # the second had step 4 left, the first has two more
    assert [table.first_step for table in tables] == [3, 4]


@torch.inference_mode()
def test_a_forward_that_nobody_announced_is_projected_and_has_room() -> None:
    transformer = flux()
    reference = copy.deepcopy(transformer)
    looked_up(transformer, max_rows=1)
    rows = count_projections(transformer)

    for times in (TIMES[:1], TIMES[:4], TIMES[1:3]):
        torch.testing.assert_close(
            run(transformer, times), run(reference, times), atol=1e-6, rtol=0
        )
    assert rows == [1, 4, 2]


@torch.inference_mode()
def test_a_table_holds_memory_of_its_own_steps_only() -> None:
    transformer = flux()
    modulations = looked_up(transformer)
    tables = [Table(), Table()]
    embed = embedder(transformer)
    with modulations.announced([Wanted(table, 0, NUM_STEPS, embed) for table in tables]):
        for table in tables:
            assert table.rows is not None
            assert table.rows.untyped_storage().nbytes() == table.rows.nbytes


def test_the_window_is_what_memory_leaves_and_never_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transformer = flux()
    row_bytes = 4 * sum(
        module.out_features
        for name, module in transformer.named_modules()
        if name.endswith("linear")
    )
    monkeypatch.setattr(modulation, "MAX_TABLE_BYTES", 10 * row_bytes)

    assert looked_up(flux(), max_rows=3).window == 3
    assert looked_up(flux(), max_rows=20).window == 1
    monkeypatch.undo()
    assert looked_up(flux()).window == modulation.MAX_WINDOW


def test_every_modulation_of_a_block_is_found() -> None:
    transformer = QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=8,
        axes_dims_rope=(4, 6, 6),
    )
    Modulations(transformer, transformer.time_text_embed, max_rows=1, max_tables=1)
    found = {
        name
        for name, module in transformer.named_modules()
        if isinstance(module, modulation.LookedUp)
    }

    blocks = {
        f"transformer_blocks.{i}.{name}.1" for i in range(2) for name in ("img_mod", "txt_mod")
    }
    assert found == {*blocks, "norm_out.linear"}
