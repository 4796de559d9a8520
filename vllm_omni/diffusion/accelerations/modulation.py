"""Modulations looked up: what the blocks project from the time embedding, for many steps at once.

Every block of such a denoiser projects the same embedding (of timestep, and of pooled text and
guidance where the family has them) to its shifts, scales and gates. For one row that is a matrix
product that only reads weights, 13 GB of them where there are 60 large blocks. They are read once
for a window of a request's steps instead, and a forward takes its rows out of the tables.

The compiled blocks read one buffer, whatever fills it: rows that were announced come from tables;
a forward that nobody announced is projected as in the reference.

R rows of a forward, S steps of a window, M channels of all projections together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from diffusers.models import normalization

MAX_WINDOW: Final = 64
"""Most steps that are projected at once."""
MAX_TABLE_BYTES: Final = 1024**3
"""What the tables of all requests of a replica may hold, as long as each needs no more than its
next step."""

_NORMS: Final = (
    normalization.AdaLayerNormZero,
    normalization.AdaLayerNormZeroSingle,
    normalization.AdaLayerNormContinuous,
    normalization.SD35AdaLayerNormZeroX,
)


@dataclass(slots=True, eq=False)
class Table:
    """Modulations of some steps of one row of a request: [S, M]."""

    first_step: int = 0
    rows: torch.Tensor | None = None

    def row(self, step: int) -> torch.Tensor | None:
        """[M] of a step, if the table has it."""
        index = step - self.first_step
        if self.rows is None or not 0 <= index < len(self.rows):
            return None
        return self.rows[index]


Tables = dict[bool, Table]
"""Those of a request: of its unconditional row (True) and of the others."""


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """A row of the forward to come."""

    table: Table
    step: int
    num_steps: int
    """Of the request."""
    embed: Callable[[int, int], torch.Tensor] = field(repr=False)
    """The time embeddings of the steps from the first to before the second, [S, D]."""


class LookedUp(torch.nn.Module):
    """In the place of a projection."""

    def __init__(self, projection: torch.nn.Module, rows: torch.Tensor) -> None:
        super().__init__()
        self.projection = projection
        self.rows: torch.Tensor
        self.register_buffer("rows", rows, persistent=False)

    def forward(self, embedding: torch.Tensor) -> torch.Tensor:
        return self.rows[: embedding.shape[0]]


class Modulations:
    """All projections of one denoiser."""

    def __init__(
        self,
        denoiser: torch.nn.Module,
        embedder: torch.nn.Module,
        *,
        max_rows: int,
        max_tables: int,
    ) -> None:
        """Take the projections' places. `embedder` makes the time embedding within a forward."""
        places = _places(denoiser)
        self._projections = [getattr(parent, name) for parent, name in places]
        self._widths = [projection.out_features for projection in self._projections]
        self._announced: list[torch.Tensor] | None = None
        weight = self._projections[0].weight
        self._rows = weight.new_zeros(max_rows, sum(self._widths), requires_grad=False)
        self._modules = [
            LookedUp(projection, rows)
            for projection, rows in zip(self._projections, self._views(), strict=True)
        ]
        for (parent, name), module in zip(places, self._modules, strict=True):
            setattr(parent, name, module)
        self.window = max(
            1,
            min(MAX_WINDOW, MAX_TABLE_BYTES // (max_tables * self._rows[0].nbytes)),
        )
        embedder.register_forward_hook(self._embedded)

    def __repr__(self) -> str:
        return f"<Modulations of {len(self._widths)} projections, window {self.window}>"

    def _views(self) -> Sequence[torch.Tensor]:
        return self._rows.split(self._widths, dim=1)

    @contextlib.contextmanager
    def announced(self, wanted: Sequence[Wanted]) -> Iterator[None]:
        """The forward within has these rows; those that no table has are projected together."""
        missing: dict[int, Wanted] = {}
        for one in wanted:
            if one.table.row(one.step) is None:
                missing[id(one.table)] = one
        self._fill(list(missing.values()))
        rows = [one.table.row(one.step) for one in wanted]
        self._announced = [row for row in rows if row is not None]
        try:
            yield
        finally:
            self._announced = None

    def _fill(self, wanted: Sequence[Wanted]) -> None:
        if not wanted:
            return
        for one in wanted:
            one.table.rows = None  # before there is a new one
        ends = [min(one.step + self.window, one.num_steps) for one in wanted]
        embeddings = [one.embed(one.step, end) for one, end in zip(wanted, ends, strict=True)]
        projected = self._project(torch.cat(embeddings))
        for one, rows in zip(wanted, projected.split([len(e) for e in embeddings]), strict=True):
            one.table.first_step = one.step
            # its own memory: the others' would stay with it
            one.table.rows = rows.clone() if len(wanted) > 1 else rows

    def _project(self, embeddings: torch.Tensor) -> torch.Tensor:
        """[S, D] to [S, M], with the adapters that are on."""
        activated = torch.nn.functional.silu(embeddings)
        out = self._rows.new_empty(len(embeddings), self._rows.shape[1])
        for projection, columns in zip(
            self._projections, out.split(self._widths, dim=1), strict=True
        ):
            columns.copy_(projection(activated))
        return out

    def _embedded(
        self, module: torch.nn.Module, arguments: object, embeddings: torch.Tensor
    ) -> None:
        """Before the blocks of a forward run: put its rows where they read them."""
        num_rows = len(embeddings)
        if num_rows > len(self._rows):
            self._grow(num_rows)
        rows = self._rows[:num_rows]
        if self._announced is None:
            rows.copy_(self._project(embeddings))
        else:
            torch.stack(self._announced, out=rows)

    def _grow(self, num_rows: int) -> None:
        self._rows = self._rows.new_zeros(num_rows, self._rows.shape[1])
        for module, rows in zip(self._modules, self._views(), strict=True):
            module.rows = rows


def _places(denoiser: torch.nn.Module) -> list[tuple[torch.nn.Module, str]]:
    """Where a linear layer projects what SiLU makes of the time embedding: the module, its name."""
    places: list[tuple[Any, str]] = []
    for module in denoiser.modules():
        if isinstance(module, _NORMS):
            places.append((module, "linear"))
        elif isinstance(module, torch.nn.Sequential) and _is_projection(module):
            places.append((module, "1"))
    return places


def _is_projection(module: torch.nn.Sequential) -> bool:
    return len(module) == 2 and isinstance(module[0], torch.nn.SiLU) and _widens(module[1])


def _widens(linear: torch.nn.Module) -> bool:
    inside, outside = getattr(linear, "in_features", 0), getattr(linear, "out_features", 0)
    return bool(inside) and outside in (3 * inside, 6 * inside)
