"""The API loop's side of an autoregressive stage: prompts validated before anything is admitted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.config import ModelConfig, VllmConfig
from vllm.sampling_params import SamplingParams

from vllm_omni.engine.ar_prompts import SPECIAL_TOKENS_KEY, PreparedPrompt, PromptProcessor
from vllm_omni.inputs.prompt import OmniPrompt

if TYPE_CHECKING:
    from vllm.renderers import BaseRenderer
    from vllm.tokenizers import TokenizerLike
    from vllm.v1.engine.input_processor import InputProcessor


class ArPreparer:
    """One per stage, shared by its replicas; also what vLLM's serving classes render with."""

    def __init__(self, stage: str, vllm_config: VllmConfig) -> None:
        """Loads the tokenizer; blocks."""
        self.stage = stage
        self.vllm_config = vllm_config
        self._prompts = PromptProcessor(stage, vllm_config)

    @property
    def model_config(self) -> ModelConfig:
        return self.vllm_config.model_config

    @property
    def renderer(self) -> BaseRenderer:
        return self._prompts.renderer

    @property
    def input_processor(self) -> InputProcessor:
        return self._prompts.input_processor

    @property
    def tokenizer(self) -> TokenizerLike:
        return self.renderer.get_tokenizer()

    async def prepare(
        self, request_id: str, prompt: OmniPrompt, params: object, options: dict[str, object]
    ) -> list[PreparedPrompt]:
        """Engine requests of a prompt: one entry, or one for each audio item of a speech model.

        Raises:
            BadRequestError: names the field that cannot be served.
        """
        return await self._prompts.process(request_id, prompt, params, options)

    async def render_messages(
        self,
        messages: object,
        template_kwargs: Mapping[str, object] | None = None,
        processor_kwargs: Mapping[str, object] | None = None,
    ) -> OmniPrompt:
        """A conversation through the chat template; `text` holds what it rendered to.

        Raises:
            BadRequestError: not a conversation, or the template refuses it.
        """
        rendered = await self._prompts.render_chat(messages, template_kwargs, processor_kwargs)
        return OmniPrompt(
            engine_input=rendered,
            text=rendered.get("prompt"),
            extra={SPECIAL_TOKENS_KEY: False},
        )

    def source_context(self, params: object) -> dict[str, Any]:
        """`StreamSource.context` of a stage that this one streams its tokens to."""
        assert isinstance(params, SamplingParams), f"{self.stage} takes SamplingParams"
        return {
            "tokenizer_dir": str(self.model_config.tokenizer),
            "stop": list(params.stop or ()),
            "include_stop_str_in_output": params.include_stop_str_in_output,
            "skip_special_tokens": params.skip_special_tokens,
        }

    def shutdown(self) -> None:
        """Stop the renderer's threads. Repeatable."""
        self._prompts.shutdown()
