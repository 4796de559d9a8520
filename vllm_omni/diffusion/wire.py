"""What the diffusion client and its replica say to each other: a closed set of tagged structs.

A message is one frame with a struct, followed by raw frames for pixels, which the struct names by
their number. Unknown tags and fields are refused at decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.engine.messages import StageFailure, StageOutput
from vllm_omni.generation.wire import Abort, RawFrame, Utility, UtilityResult, encode
from vllm_omni.outputs.media import Frames, StepProgress

if TYPE_CHECKING:
    from numpy.typing import NDArray


class PixelsRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """8 bit pixels in a raw frame."""

    frame: int
    shape: tuple[int, ...]
    frame_rate: float | None = None


class RequestData(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `DiffusionRequest` on the wire: the same fields, its pixels as raw frames."""

    request_id: str
    prompt: str
    negative_prompt: str | None
    seed: int
    num_inference_steps: int
    height: int | None
    width: int | None
    num_frames: int
    fps: int | None
    guidance_scale: float | None
    true_cfg_scale: float | None
    strength: float | None
    max_sequence_length: int | None
    quality: str | None
    images: tuple[PixelsRef, ...]
    mask: PixelsRef | None
    lora: str | None
    lora_scale: float
    upstream: dict[str, Any]
    extra_args: dict[str, Any]


class Add(msgspec.Struct, tag="add", frozen=True, forbid_unknown_fields=True):
    request: RequestData
    remaining_s: float | None
    """Time left until the deadline: clocks of two hosts have nothing in common."""
    preview_interval: int | None = None


Command = Add | Abort | Utility


class Output(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One output of one request; `failure` implies `finished`."""

    request_id: str
    finished: bool
    frames: PixelsRef | None = None
    preview: PixelsRef | None = None
    progress: StepProgress | None = None
    failure: StageFailure | None = None


class Outputs(msgspec.Struct, tag="outputs", frozen=True, forbid_unknown_fields=True):
    """Everything that was ready at one moment."""

    outputs: list[Output]


Report = Outputs | UtilityResult

decode_command = msgspec.msgpack.Decoder(Command).decode
decode_report = msgspec.msgpack.Decoder(Report).decode

_PLAIN: Final = tuple(
    name for name in RequestData.__struct_fields__ if name not in ("images", "mask")
)


def pack_add(
    request: DiffusionRequest, remaining_s: float | None, preview_interval: int | None
) -> list[RawFrame]:
    """The command that begins a request."""
    frames: list[RawFrame] = [b""]
    data = pack_request(request, frames)
    frames[0] = encode(Add(data, remaining_s, preview_interval))
    return frames


def pack_request(request: DiffusionRequest, frames: list[RawFrame]) -> RequestData:
    """A request; its pixels are appended to the frames of the message."""
    return RequestData(
        images=tuple(put_pixels(image, frames) for image in request.images),
        mask=put_pixels(request.mask, frames) if request.mask is not None else None,
        **{name: getattr(request, name) for name in _PLAIN},
    )


def unpack_request(data: RequestData, frames: Sequence[RawFrame]) -> DiffusionRequest:
    """The request again; `frames` are those of the message, the struct's own included.

    Raises:
        ValueError: a frame is missing or of another size.
    """
    return DiffusionRequest(
        images=tuple(take_pixels(ref, frames) for ref in data.images),
        mask=take_pixels(data.mask, frames) if data.mask is not None else None,
        **{name: getattr(data, name) for name in _PLAIN},
    )


def pack_outputs(outputs: Sequence[StageOutput]) -> list[RawFrame]:
    """One message for all outputs. The pixels are not copied."""
    frames: list[RawFrame] = [b""]
    packed = [
        Output(
            output.request_id,
            output.finished,
            _put_frames(output.frames, frames),
            _put_frames(output.preview, frames),
            output.progress,
            output.failure,
        )
        for output in outputs
    ]
    frames[0] = encode(Outputs(packed))
    return frames


def unpack_outputs(message: Outputs, frames: Sequence[RawFrame]) -> list[StageOutput]:
    """The outputs again, in order. Their pixels lie where they arrived.

    Raises:
        ValueError: a frame is missing or of another size.
    """
    return [
        StageOutput(
            output.request_id,
            output.finished,
            frames=_take_frames(output.frames, frames),
            preview=_take_frames(output.preview, frames),
            progress=output.progress,
            failure=output.failure,
        )
        for output in message.outputs
    ]


def put_pixels(pixels: NDArray[np.uint8], frames: list[RawFrame]) -> PixelsRef:
    """Append pixels to the frames of a message; they are not copied."""
    frames.append(np.ascontiguousarray(pixels).data.cast("B"))
    return PixelsRef(len(frames) - 1, pixels.shape)


def take_pixels(ref: PixelsRef, frames: Sequence[RawFrame]) -> NDArray[np.uint8]:
    """The pixels again; they lie where they arrived.

    Raises:
        ValueError: the frame is missing or of another size.
    """
    return np.frombuffer(_frame(ref, frames), np.uint8).reshape(ref.shape)


def _put_frames(media: Frames | None, frames: list[RawFrame]) -> PixelsRef | None:
    if media is None:
        return None
    frames.append(media.pixels)
    shape = media.num_frames, media.height, media.width
    return PixelsRef(len(frames) - 1, shape, media.frame_rate)


def _take_frames(ref: PixelsRef | None, frames: Sequence[RawFrame]) -> Frames | None:
    if ref is None:
        return None
    num_frames, height, width = ref.shape
    pixels = memoryview(_frame(ref, frames))
    if len(pixels) != num_frames * height * width * 3:
        raise ValueError(f"{len(pixels)} bytes are no pixels of shape {ref.shape}")
    return Frames(pixels, num_frames, height, width, ref.frame_rate)


def _frame(ref: PixelsRef, frames: Sequence[RawFrame]) -> RawFrame:
    if not 0 < ref.frame < len(frames):
        raise ValueError(f"frame {ref.frame} of {len(frames)} is missing")
    return frames[ref.frame]
