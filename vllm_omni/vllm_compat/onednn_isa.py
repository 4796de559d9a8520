"""oneDNN multiplies with AVX-512 instead of AMX.

Why:      on a processor with AMX, vLLM's attention kernels configure the tile registers and leave
          them so; oneDNN takes the configuration it set before for granted, and every bf16
          product after an attention call can come out wrong. The model then writes fluent nonsense.
Why not a subclass: both sides are compiled code, chosen by the processor's features.
Breaks if: oneDNN renames the variable, or reads it before general plugins run.
Remove when: vLLM's attention releases the tiles, or a bf16 model on AMX agrees with float32.

A value that the operator set stays.
"""

from __future__ import annotations

import os
from typing import Final

VARIABLE: Final = "ONEDNN_MAX_CPU_ISA"
WITHOUT_AMX: Final = "AVX512_CORE_BF16"


def install() -> None:
    """Set the bound for this process and its children. Repeatable."""
    os.environ.setdefault(VARIABLE, WITHOUT_AMX)
