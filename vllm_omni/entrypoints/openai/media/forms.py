"""Bodies that are JSON or a form with files: fields as a JSON object, files beside them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from fastapi import Request
from pydantic import BaseModel
from starlette.datastructures import UploadFile

from vllm_omni.config.deploy import ServerLimits
from vllm_omni.entrypoints.openai.media.image_loader import (
    ImageSource,
    InputImages,
    image_source_from_url,
)
from vllm_omni.entrypoints.openai.responses import read_json
from vllm_omni.entrypoints.openai.serving import parse_model
from vllm_omni.errors import BadRequestError, UnsupportedMediaTypeError

M = TypeVar("M", bound=BaseModel)
_NAME: Final = re.compile(r"(?P<name>\w+)(?:\[(?P<inner>\w*)\])?")
_MAX_FIELDS: Final = 64
_JSON_FIELDS: Final = frozenset({"extra_args"})
"""Fields of a form whose text is JSON."""
_BASE64_FACTOR: Final = 1.4


@dataclass(slots=True)
class MediaBody:
    """A request's fields, with pictures taken out by `take_images`."""

    fields: dict[str, Any]
    files: dict[str, list[ImageSource]] = field(default_factory=dict)
    """Uploaded files by the field's name."""
    is_form: bool = False
    """Values are texts."""

    def parse(self, model: type[M]) -> M:
        """The fields as a request.

        Raises:
            ValidationError, BadRequestError: names the first field that is wrong.
        """
        for name in self.files:
            raise BadRequestError("this field is no file", field=name)
        if self.is_form:
            return model.model_validate(self.fields, strict=False)
        return parse_model(model, self.fields)

    def take_images(self, *names: str, mask: str | None = None) -> InputImages:
        """Pictures under these names: files, data URLs, or `{"image_url": URL}`.

        Raises:
            BadRequestError: names the one that is none.
        """
        images = [source for name in names for source in self._take(name)]
        masks = self._take(mask) if mask is not None else []
        if len(masks) > 1:
            raise BadRequestError("there is one mask at most", field=mask)
        return InputImages(tuple(images), masks[0] if masks else None)

    def _take(self, name: str) -> list[ImageSource]:
        uploaded = self.files.pop(name, [])
        value = self.fields.pop(name, None)
        if value is None:
            return uploaded
        if isinstance(value, list):
            return uploaded + [_source(one, f"{name}[{i}]") for i, one in enumerate(value)]
        return [*uploaded, _source(value, name)]


def _source(value: object, path: str) -> ImageSource:
    if isinstance(value, Mapping):
        unknown = sorted(set(value) - {"image_url"})
        if unknown or "image_url" not in value:
            name = unknown[0] if unknown else "image_url"
            raise BadRequestError(
                "a picture is a file or {'image_url': URL}", field=f"{path}.{name}"
            )
        value, path = value["image_url"], f"{path}.image_url"
    if not isinstance(value, str):
        raise BadRequestError("a picture is a file or a URL", field=path)
    return image_source_from_url(value, path)


async def read_media_body(request: Request, limits: ServerLimits) -> MediaBody:
    """The body of a request that may bring pictures.

    Raises:
        BadRequestError: it is not what its content type says.
        UnsupportedMediaTypeError: neither JSON nor a form.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        return MediaBody(await read_json(request))
    if kind == "multipart/form-data":
        return await _read_form(request, limits)
    raise UnsupportedMediaTypeError("send application/json or multipart/form-data")


async def _read_form(request: Request, limits: ServerLimits) -> MediaBody:
    body = MediaBody({}, is_form=True)
    max_part_size = int(limits.max_image_bytes * _BASE64_FACTOR)
    async with request.form(
        max_files=limits.max_media_items + 1, max_fields=_MAX_FIELDS, max_part_size=max_part_size
    ) as form:
        for key, value in form.multi_items():
            match = _NAME.fullmatch(key)
            if match is None:
                raise BadRequestError("the form has a field without a proper name", field=key[:64])
            name, inner = match["name"], match["inner"]
            if isinstance(value, UploadFile):
                found = body.files.setdefault(name, [])
                path = name if inner is None else f"{name}[{len(found)}]"
                data = await value.read(limits.max_image_bytes + 1)
                found.append(ImageSource(path, data=data))
            else:
                _add(body.fields, name, inner, value)
    return body


def _add(fields: dict[str, Any], name: str, inner: str | None, text: str) -> None:
    """One text of a form: `a`, `a[]` for a list, `a[b]` for an object."""
    value: object = _from_json(name, text) if name in _JSON_FIELDS and inner is None else text
    if inner is None:
        if name in fields:
            raise BadRequestError("the form has this field twice", field=name)
        fields[name] = value
        return
    holder = fields.setdefault(name, {} if inner else [])
    if inner and isinstance(holder, dict) and inner not in holder:
        holder[inner] = value
    elif not inner and isinstance(holder, list):
        holder.append(value)
    else:
        raise BadRequestError("the form has this field twice", field=name)


def _from_json(name: str, text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise BadRequestError("not valid JSON", field=name) from None
