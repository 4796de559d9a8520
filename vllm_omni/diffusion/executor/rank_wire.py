"""What a replica and the processes of its ranks say to each other: a closed set of tagged structs.

A message is one frame with a struct, followed by raw frames for pixels. Unknown tags and fields are
refused at decode. A batch key crosses as its `repr`: keys are plain values, so equal ones read
alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vllm_omni.diffusion import wire
from vllm_omni.diffusion.executor.jobs import (
    Decode,
    Job,
    Made,
    Prepare,
    Prepared,
    Preview,
    Previewed,
    Result,
    Run,
    Step,
    Stepped,
)
from vllm_omni.engine.messages import StageFailure
from vllm_omni.generation.wire import RawFrame, encode


class PrepareJob(msgspec.Struct, tag="prepare", frozen=True, forbid_unknown_fields=True):
    request: wire.RequestData


class StepJob(msgspec.Struct, tag="step", frozen=True, forbid_unknown_fields=True):
    request_ids: tuple[str, ...]


class DecodeJob(msgspec.Struct, tag="decode", frozen=True, forbid_unknown_fields=True):
    request_id: str


class PreviewJob(msgspec.Struct, tag="preview", frozen=True, forbid_unknown_fields=True):
    request_id: str


class Drop(msgspec.Struct, tag="drop", frozen=True, forbid_unknown_fields=True):
    """No job: it is done when it is read, and none of these is in a step that was begun."""

    request_ids: tuple[str, ...]


class PreparedResult(msgspec.Struct, tag="prepared", frozen=True, forbid_unknown_fields=True):
    request_id: str
    key: str
    step: int
    num_steps: int
    failure: StageFailure | None


class SteppedResult(msgspec.Struct, tag="stepped", frozen=True, forbid_unknown_fields=True):
    request_ids: tuple[str, ...]
    failures: dict[str, StageFailure]


class MadeResult(msgspec.Struct, tag="made", frozen=True, forbid_unknown_fields=True):
    request_id: str
    pixels: wire.PixelsRef | None
    failure: StageFailure | None


class PreviewedResult(msgspec.Struct, tag="previewed", frozen=True, forbid_unknown_fields=True):
    request_id: str
    pixels: wire.PixelsRef | None


Order = PrepareJob | StepJob | DecodeJob | PreviewJob | Drop
AnyResult = PreparedResult | SteppedResult | MadeResult | PreviewedResult


class Report(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What came of a rank's job."""

    rank: int
    result: AnyResult


_decode_order = msgspec.msgpack.Decoder(Order).decode
_decode_report = msgspec.msgpack.Decoder(Report).decode


def pack_job(job: Job) -> list[RawFrame]:
    """A job for a rank."""
    frames: list[RawFrame] = [b""]
    order: Order
    match job:
        case Prepare(request):
            order = PrepareJob(wire.pack_request(request, frames))
        case Step(request_ids):
            order = StepJob(request_ids)
        case Decode(request_id):
            order = DecodeJob(request_id)
        case Preview(request_id):
            order = PreviewJob(request_id)
        case Run():
            raise AssertionError("several ranks run no whole requests")
    frames[0] = encode(order)
    return frames


def pack_drop(request_ids: Sequence[str]) -> list[RawFrame]:
    """Have a rank forget requests."""
    return [encode(Drop(tuple(request_ids)))]


def unpack_order(frames: Sequence[RawFrame]) -> Job | Drop:
    """What a rank is to do.

    Raises:
        msgspec.DecodeError: the message is none of these.
        ValueError: a frame of pixels is missing or of another size.
    """
    order: Order = _decode_order(frames[0])
    match order:
        case PrepareJob(request):
            return Prepare(wire.unpack_request(request, frames))
        case StepJob(request_ids):
            return Step(request_ids)
        case DecodeJob(request_id):
            return Decode(request_id)
        case PreviewJob(request_id):
            return Preview(request_id)
        case Drop():
            return order


def pack_result(rank: int, result: Result) -> list[RawFrame]:
    """What came of a job."""
    frames: list[RawFrame] = [b""]
    packed: AnyResult
    match result:
        case Prepared():
            packed = PreparedResult(
                result.request_id, repr(result.key), result.step, result.num_steps, result.failure
            )
        case Stepped():
            packed = SteppedResult(result.request_ids, dict(result.failures))
        case Made(request_id, pixels, failure):
            ref = wire.put_pixels(pixels, frames) if pixels is not None else None
            packed = MadeResult(request_id, ref, failure)
        case Previewed(request_id, pixels):
            ref = wire.put_pixels(pixels, frames) if pixels is not None else None
            packed = PreviewedResult(request_id, ref)
        case _:
            raise AssertionError(f"{result!r} is no end of a job that a rank is given")
    frames[0] = encode(Report(rank, packed))
    return frames


def unpack_result(frames: Sequence[RawFrame]) -> tuple[int, Result]:
    """The rank, and what came of its job.

    Raises:
        msgspec.DecodeError: the message is none of these.
        ValueError: a frame of pixels is missing or of another size.
    """
    report = _decode_report(frames[0])
    result = report.result
    match result:
        case PreparedResult():
            return report.rank, Prepared(
                result.request_id, result.key, result.step, result.num_steps, result.failure
            )
        case SteppedResult():
            return report.rank, Stepped(result.request_ids, result.failures)
        case MadeResult(request_id, ref, failure):
            pixels = wire.take_pixels(ref, frames) if ref is not None else None
            return report.rank, Made(request_id, pixels, failure)
        case PreviewedResult(request_id, ref):
            pixels = wire.take_pixels(ref, frames) if ref is not None else None
            return report.rank, Previewed(request_id, pixels)
