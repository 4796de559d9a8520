"""The engine core builds our manager of grammars.

Why:      vLLM lets one slow grammar hold up every request of the core, and serves all requests by
          the backend that the first one needed.
Why not a subclass: it is one, but `EngineCore.__init__` names the class it builds by the module's
          global and hands it to the scheduler at once.
Breaks if: the core takes the class from elsewhere, the scheduler follows grammars other than by
          `accept_tokens` and `grammar_bitmask`, or compiling is not `_create_grammar` any more.
Remove when: the class can be configured, as the scheduler's can.
"""

from __future__ import annotations

import vllm.v1.engine.core as core
from vllm.v1.structured_output import StructuredOutputManager


def install(manager_class: type[StructuredOutputManager]) -> None:
    """Make this process's engine core build `manager_class`. Repeatable."""
    core.StructuredOutputManager = manager_class
