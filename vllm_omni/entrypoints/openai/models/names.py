"""The served names of a pipeline that has no text stage for vLLM's own list."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Protocol

from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.serve.engine.protocol import ModelCard, ModelList


class ModelNames(Protocol):
    """What `OmniModels` needs of vLLM's `OpenAIServingModels`."""

    @property
    def base_model_paths(self) -> Sequence[BaseModelPath]: ...

    def is_base_model(self, model_name: str) -> bool: ...

    async def show_available_models(self) -> ModelList: ...


class ServedNames:
    """The names of `--served-model-name`, or the model's own."""

    def __init__(self, args: Namespace) -> None:
        names = args.served_model_name or [args.model]
        self.base_model_paths = [BaseModelPath(name=name, model_path=args.model) for name in names]

    def is_base_model(self, model_name: str) -> bool:
        return any(path.name == model_name for path in self.base_model_paths)

    async def show_available_models(self) -> ModelList:
        return ModelList(
            data=[ModelCard(id=path.name, root=path.model_path) for path in self.base_model_paths]
        )
