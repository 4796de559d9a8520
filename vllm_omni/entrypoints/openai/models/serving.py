"""The models of this server, with modalities, voices and tasks as further fields."""

from __future__ import annotations

import builtins
from http import HTTPStatus
from typing import Any

from vllm.entrypoints.openai.models.serving import OpenAIServingModels

from vllm_omni.entrypoints.openai.capabilities import Capabilities
from vllm_omni.entrypoints.openai.errors import AnsweredError, HttpError


class OmniModels:
    """Names, and what stands behind them."""

    def __init__(self, models: OpenAIServingModels, capabilities: Capabilities) -> None:
        self._models = models
        self._facts = {
            "tasks": builtins.list(capabilities.tasks),
            "modalities": {
                "input": sorted(capabilities.chat_inputs),
                "output": sorted(capabilities.outputs),
            },
            "voices": builtins.list(capabilities.voices),
            "stages": [stage.name for stage in capabilities.pipeline.stages],
        }

    def check_name(self, name: str | None) -> str:
        """The served name; the first one when the request names none."""
        if not name:
            return str(self._models.base_model_paths[0].name)
        if not self._models.is_base_model(name):
            raise _not_found(name)
        return name

    async def list(self) -> dict[str, Any]:
        answer = (await self._models.show_available_models()).model_dump()
        for card in answer["data"]:
            card.update(self._facts)
        return answer

    async def retrieve(self, name: str) -> dict[str, Any]:
        for card in (await self.list())["data"]:
            if card["id"] == name:
                return dict(card)
        raise _not_found(name)


def _not_found(name: str) -> AnsweredError:
    message = f"the model {name!r} does not exist"
    return AnsweredError(
        HttpError(HTTPStatus.NOT_FOUND, message, "NotFoundError", "model_not_found", "model")
    )
