"""What vLLM keeps of the processors of renderers that have ended.

Why:      it caches by the tokenizer and by the processor itself, and every renderer has its own:
          each start of a replica that hears or sees would leave what it loaded, up to 128 times.
Why not a subclass: the caches belong to functions.
Breaks if: processors are in other caches too; a test of a replica that hears counts what stays.
Remove when: the caches are by the names of what was loaded.
"""

from __future__ import annotations

from vllm.transformers_utils import processor
from vllm.utils import func_utils


def forget_processors() -> None:
    """Let go of every processor. Renderers that go on load theirs again at their next request."""
    processor.cached_get_processor.cache_clear()
    processor.get_processor_kwargs_type.cache_clear()
    func_utils._supports_kw.cache_clear()
