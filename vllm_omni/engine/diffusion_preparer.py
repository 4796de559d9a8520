"""The API loop's side of a diffusion stage: prompt and params are checked before admission."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from vllm_omni.diffusion.checks import make_request
from vllm_omni.diffusion.models.interface import Capabilities
from vllm_omni.errors import BadRequestError
from vllm_omni.inputs.diffusion import OmniDiffusionSamplingParams
from vllm_omni.inputs.prompt import OmniPrompt


class DiffusionPreparer:
    """Validates what is to be made; the prompt itself goes on unchanged."""

    def __init__(
        self, stage: str, capabilities: Capabilities, adapters: Collection[str] = ()
    ) -> None:
        """`adapters` are the names of the LoRA adapters that the replicas load."""
        self._stage = stage
        self._adapters = tuple(sorted(adapters))
        self.capabilities = capabilities

    async def prepare(
        self, request_id: str, prompt: OmniPrompt, params: object, options: dict[str, object]
    ) -> OmniPrompt:
        """Check prompt and params; see `StagePreparer`."""
        if options:
            name = min(options)
            raise BadRequestError(f"a diffusion stage has no option {name!r}", field=name)
        if not isinstance(params, OmniDiffusionSamplingParams):
            raise BadRequestError(
                f"params of stage {self._stage} are OmniDiffusionSamplingParams, not "
                f"{type(params).__name__}",
                field="sampling_params",
            )
        if params.lora is not None and params.lora not in self._adapters:
            known = ", ".join(self._adapters) or "none"
            raise BadRequestError(f"no adapter {params.lora!r}; known: {known}", field="lora")
        make_request(request_id, prompt, params, self.capabilities)
        return prompt

    def source_context(self, params: object) -> dict[str, Any]:
        return {}

    def shutdown(self) -> None:
        """Nothing to give back."""
