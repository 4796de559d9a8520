"""The two pictures that the text stage of GLM-Image writes; imports no torch."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from vllm_omni.errors import BadRequestError

GRIDS: Final = re.compile(r"<sop>(\d+) (\d+)<eop><sop>(\d+) (\d+)<eop>(?:<\|[^|]*\|>)?$")
TOKEN_PIXELS: Final = 32
SMALL_SIDE: Final = 16
"""Tokens on a side of the small picture, where it is square."""
MAX_SIDE: Final = 127
"""Tokens on the longest side."""


class Grids(NamedTuple):
    """Rows and columns of tokens of both pictures."""

    rows: int
    columns: int
    small_rows: int
    small_columns: int

    @classmethod
    def of_size(cls, height: int, width: int) -> Grids:
        """Of a picture of so many pixels.

        Raises:
            BadRequestError: a side is longer than this model takes.
        """
        for name, pixels in (("height", height), ("width", width)):
            if not TOKEN_PIXELS <= pixels <= MAX_SIDE * TOKEN_PIXELS:
                raise BadRequestError(
                    f"{name} must be {TOKEN_PIXELS} to {MAX_SIDE * TOKEN_PIXELS}, got {pixels}",
                    field=name,
                )
        rows, columns = height // TOKEN_PIXELS, width // TOKEN_PIXELS
        ratio = rows / columns
        return cls(
            rows, columns, int(ratio**0.5 * SMALL_SIDE), int((1 / ratio) ** 0.5 * SMALL_SIDE)
        )

    @classmethod
    def of_text(cls, text: str) -> Grids | None:
        """As the end of a prompt names them; None: it names none."""
        found = GRIDS.search(text)
        return cls(*map(int, found.groups())) if found else None

    @property
    def num_small(self) -> int:
        return self.small_rows * self.small_columns

    @property
    def num_large(self) -> int:
        return self.rows * self.columns

    def as_text(self) -> str:
        """What the prompt ends with, before the token that begins the picture."""
        return (
            f"<sop>{self.rows} {self.columns}<eop><sop>{self.small_rows} {self.small_columns}<eop>"
        )
