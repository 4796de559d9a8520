"""Version of this package, and the one vLLM release it plugs into."""

from typing import Final

__version__: Final = "0.1.0"

SUPPORTED_VLLM: Final = "0.32.0"
