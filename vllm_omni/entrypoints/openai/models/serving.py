"""The models of this server, with modalities, voices and tasks as further fields."""

from __future__ import annotations

import builtins
from http import HTTPStatus
from typing import Any

from vllm_omni.diffusion.models.interface import Capabilities as DiffusionCapabilities
from vllm_omni.diffusion.models.interface import ExecutionMode
from vllm_omni.entrypoints.openai.capabilities import Capabilities
from vllm_omni.entrypoints.openai.errors import AnsweredError, HttpError
from vllm_omni.entrypoints.openai.models.names import ModelNames


class OmniModels:
    """Names, and what stands behind them."""

    def __init__(self, models: ModelNames, capabilities: Capabilities) -> None:
        self._models = models
        self._facts: dict[str, Any] = {
            "tasks": builtins.list(capabilities.tasks),
            "modalities": {
                "input": sorted(capabilities.inputs),
                "output": sorted(capabilities.outputs),
            },
            "voices": builtins.list(capabilities.voices),
            "stages": [stage.name for stage in capabilities.pipeline.stages],
        }
        if capabilities.diffusion is not None:
            self._facts["diffusion"] = _diffusion_facts(capabilities.diffusion)

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


def _diffusion_facts(known: DiffusionCapabilities) -> dict[str, Any]:
    """What a client may ask of the model, and what it cannot do."""
    has_step_batching = known.mode is ExecutionMode.STEP
    abilities = {
        "step_batching": has_step_batching,
        "step_progress": known.has_step_progress,
        "partial_images": known.has_preview,
        "mask": known.takes_mask,
        "lora": known.loads_lora,
    }
    return {
        "mode": known.mode,
        **abilities,
        "cannot": [name for name, can in abilities.items() if not can],
        "params": sorted(known.params),
        "defaults": dict(known.defaults),
        "images": {"min": known.min_images, "max": known.max_images},
        "size_multiple": known.size_multiple,
        "max_pixels": known.max_pixels,
        "max_frames": known.max_frames,
        "max_steps": known.max_steps,
    }


def _not_found(name: str) -> AnsweredError:
    message = f"the model {name!r} does not exist"
    return AnsweredError(
        HttpError(HTTPStatus.NOT_FOUND, message, "NotFoundError", "model_not_found", "model")
    )
