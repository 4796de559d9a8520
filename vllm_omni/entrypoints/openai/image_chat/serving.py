"""Pictures as the answer of a chat: one choice for each, its content a data URL."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import msgspec

from vllm_omni.config.pipeline import Task
from vllm_omni.entrypoints.openai.errors import describe
from vllm_omni.entrypoints.openai.image_chat.messages import take_message
from vllm_omni.entrypoints.openai.image_chat.protocol import ImageChatRequest
from vllm_omni.entrypoints.openai.images.pictures import (
    DenoiseRequests,
    PictureFile,
    denoise_params,
)
from vllm_omni.entrypoints.openai.images.usage import patches
from vllm_omni.entrypoints.openai.responses import primed
from vllm_omni.entrypoints.openai.serving import parse_model
from vllm_omni.entrypoints.prompts import DeferredPrompt
from vllm_omni.errors import OmniError, RequestFailedError, UnsupportedModalityError
from vllm_omni.inputs.prompt import OmniPrompt
from vllm_omni.outputs.request_output import OmniRequestOutput


@dataclass(slots=True)
class ChatPictures:
    """A chat whose first output is there, or all of it to come."""

    id: str
    created_s: int
    model: str
    prompt: str
    num_choices: int
    file: PictureFile
    outputs: AsyncGenerator[OmniRequestOutput, None]
    with_usage: bool
    stream: bool
    num_image_tokens: int = 0

    def usage(self) -> dict[str, int]:
        text, image = len(self.prompt), self.num_image_tokens
        return {
            "prompt_tokens": text,
            "completion_tokens": image,
            "total_tokens": text + image,
        }

    def chunk(self, choices: list[dict[str, Any]], **more: object) -> str:
        """One event of the stream."""
        body = {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created_s,
            "model": self.model,
            "choices": choices,
            **more,
        }
        return f"data: {msgspec.json.encode(body).decode()}\n\n"


class ImageChatServing:
    """Knows no HTTP."""

    def __init__(self, requests: DenoiseRequests) -> None:
        self._requests = requests

    def check_admission(self) -> None:
        self._requests.check_admission()

    def begin(self, body: dict[str, Any]) -> ChatPictures:
        """Check a request; nothing runs before its outputs are asked for.

        Raises:
            OmniError, AnsweredError: it cannot be served.
        """
        prompt, given = take_message(body)
        request = parse_model(ImageChatRequest, body)
        if request.modalities is not None and "image" not in request.modalities:
            raise UnsupportedModalityError("this model writes image", field="modalities")
        model = self._requests.check_request(request, prompt, given)
        file = PictureFile.of(request)
        num = 1 if request.n is None else request.n
        params = denoise_params(request, num_outputs_per_prompt=num, strength=request.strength)
        self._requests.check_admission(num)
        options = request.stream_options

        async def load() -> OmniPrompt:
            return await self._requests.load(prompt, given)

        return ChatPictures(
            id=f"chatcmpl-{uuid4().hex}",
            created_s=int(time.time()),
            model=model,
            prompt=prompt,
            num_choices=num,
            file=file,
            outputs=self._requests.run(Task.IMAGE, DeferredPrompt(load), params),
            with_usage=options is not None and options.include_usage,
            stream=bool(request.stream),
        )

    async def answer(self, chat: ChatPictures) -> dict[str, Any]:
        """The whole answer."""
        contents: dict[int, list[dict[str, Any]]] = {}
        async with aclosing(chat.outputs) as outputs:
            async for output in outputs:
                if output.images:
                    contents[output.index] = await self._content(chat, output)
        if len(contents) < chat.num_choices:
            raise RequestFailedError("the model gave no picture")
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": contents[index]},
                "finish_reason": "stop",
                "logprobs": None,
            }
            for index in range(chat.num_choices)
        ]
        return {
            "id": chat.id,
            "object": "chat.completion",
            "created": chat.created_s,
            "model": chat.model,
            "choices": choices,
            "usage": chat.usage(),
        }

    async def start(self, chat: ChatPictures) -> AsyncGenerator[str, None]:
        """Chunks of the answer; returns when the first output is there."""
        _, chat.outputs = await primed(chat.outputs)
        return self._chunks(chat)

    async def _chunks(self, chat: ChatPictures) -> AsyncGenerator[str, None]:
        num_done = 0
        try:
            async with aclosing(chat.outputs) as outputs:
                async for output in outputs:
                    if output.images:
                        num_done += 1
                        delta = {
                            "role": "assistant",
                            "content": await self._content(chat, output),
                        }
                        yield chat.chunk(
                            [{"index": output.index, "delta": delta, "finish_reason": "stop"}]
                        )
            if num_done < chat.num_choices:
                raise RequestFailedError("the model gave no picture")
        except OmniError as exc:
            yield describe(exc).event()
        else:
            if chat.with_usage:
                yield chat.chunk([], usage=chat.usage())
        yield "data: [DONE]\n\n"

    async def _content(self, chat: ChatPictures, output: OmniRequestOutput) -> list[dict[str, Any]]:
        image = output.images[0]
        chat.num_image_tokens += patches(*image.size)
        data = await self._requests.encode(chat.file, image)
        url = f"data:image/{chat.file.form};base64,{data}"
        return [{"type": "image_url", "image_url": {"url": url}}]
