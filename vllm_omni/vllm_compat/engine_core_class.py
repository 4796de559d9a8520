"""The engine core process builds our class.

Why:      `EngineCoreProc.run_engine_core` has the signal handling, logging and death report that a
          replica needs, but names the class it builds by the module's global.
Why not a subclass: it is a static method; a subclass inherits it and still builds the base.
Breaks if: the method takes the class from elsewhere, or passes other keywords to it.
Remove when: vLLM builds `cls` in `run_engine_core`, or lets the engine core class be configured.
"""

from __future__ import annotations

import vllm.v1.engine.core as core


def install(engine_core_class: type[core.EngineCoreProc]) -> None:
    """Make this process's `run_engine_core` build `engine_core_class`. Repeatable."""
    core.EngineCoreProc = engine_core_class
