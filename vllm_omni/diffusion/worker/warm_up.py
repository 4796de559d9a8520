"""The forwards that a replica runs before it is ready, so that no request waits for a compiler.

Compiled code is made for the sizes it first sees; what differs the second time becomes variable.
So each size is run alone, with a prompt of another length, and several at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from vllm_omni.diffusion.models.interface import Capabilities
from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.diffusion.worker.self_test import self_test_request
from vllm_omni.errors import ConfigError

_SHORT: Final = "a test"
_LONG: Final = "a much longer test with many more words in it, so that its length differs"
_BATCHES: Final = ((_SHORT,), (_LONG,), (_SHORT, _LONG), (_SHORT,) * 3, (_LONG, _SHORT, _LONG))


def warm_up_batches(
    capabilities: Capabilities, sizes: Sequence[str], max_batch_size: int
) -> list[list[DiffusionRequest]]:
    """What to run, forward by forward; the last of each size also is decoded.

    Raises:
        ConfigError: a size is none, or none that the model makes.
    """
    return [
        [_request(capabilities, width, height, prompt) for prompt in prompts]
        for width, height in _sizes(capabilities, sizes)
        for prompts in _BATCHES
        if len(prompts) <= max_batch_size
    ]


def _sizes(capabilities: Capabilities, sizes: Sequence[str]) -> list[tuple[int | None, int | None]]:
    if capabilities.self_test:  # made for one size only
        if sizes:
            raise ConfigError("compile_sizes: this model compiles for the size of its self-test")
        test = self_test_request(capabilities)
        return [(test.width, test.height)]
    if not sizes:
        width, height = capabilities.defaults.get("width"), capabilities.defaults.get("height")
        assert isinstance(width, int | None), "a default is checked by its family's test"
        assert isinstance(height, int | None), "a default is checked by its family's test"
        return [(width, height)]
    return [_parsed(size, capabilities.size_multiple) for size in sizes]


def _parsed(size: str, multiple: int) -> tuple[int, int]:
    width, _, height = size.lower().partition("x")
    if not (width.isdecimal() and height.isdecimal()):
        raise ConfigError(f"compile_sizes: write a size as 1024x768, not {size!r}")
    if int(width) % multiple or int(height) % multiple or not int(width) * int(height):
        raise ConfigError(f"compile_sizes: {size} is not made of multiples of {multiple}")
    return int(width), int(height)


def _request(
    capabilities: Capabilities, width: int | None, height: int | None, prompt: str
) -> DiffusionRequest:
    base = self_test_request(capabilities)
    fields: dict[str, Any] = {name: getattr(base, name) for name in base.__dataclass_fields__}
    frames = capabilities.defaults.get("num_frames", 1)
    guided = {"negative_prompt": ""} if "negative_prompt" in capabilities.params else {}
    return DiffusionRequest(
        **fields
        | {"prompt": prompt, "width": width, "height": height, "num_frames": frames}
        | guided
    )
