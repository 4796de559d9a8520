"""The exchange between the ranks of a replica in each denoise step.

Nobody enters a transfer between devices before everybody has said on the host that it will: a rank
that finds no memory, or raises, says so instead, and then all ranks raise the same kind of error.
So they split a batch, retry and give up alike, and nobody waits for one who does not come.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, TypeVar

import torch

from vllm_omni.diffusion.distributed.ranks import Compute, shares
from vllm_omni.generation.memory_errors import is_out_of_memory

T = TypeVar("T")
Gather = Callable[[torch.Tensor, torch.Tensor], None]
"""Fills its first argument with the second one of every rank, in the order of ranks.

Raises RuntimeError when a rank is gone or does not come."""

_is_apart: Final[ContextVar[bool]] = ContextVar("is_apart", default=False)
"""By thread."""
_MAX_DIMS: Final = 8
_TEXT_BYTES: Final = 512
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class RanksLostError(BaseException):
    """The ranks do not go on together: one is gone, or they are not at the same place.

    No `Exception`, since whoever handles failures of a request or a batch must not handle this one:
    it is the end of the replica.
    """


class PeerFailedError(Exception):
    """Another rank could not do its part; the text is that rank's."""


class _Point(enum.IntEnum):
    """Where in a step a rank is."""

    ROWS = 1
    """It has computed its share."""
    ROOM = 2
    """A rank without a share has room for the others' rows."""
    DONE = 3


class _Standing(enum.IntEnum):
    FINE = 0
    STARVED = 1
    """It found no memory."""
    FAILED = 2


@dataclass(frozen=True, slots=True)
class _Header:
    """What a rank says of itself, as eleven numbers."""

    point: int
    standing: int = _Standing.FINE
    dtype: int = -1
    shape: tuple[int, ...] = ()
    """Of one row, without the batch dimension; empty: it had none."""

    def numbers(self) -> list[int]:
        padding = (-1,) * (_MAX_DIMS - len(self.shape))
        return [self.point, self.standing, self.dtype, *self.shape, *padding]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> _Header:
        point, standing, dtype, *shape = numbers
        return cls(point, standing, dtype, tuple(size for size in shape if size >= 0))


@dataclass(slots=True)
class _Buffers:
    """What this rank sends and what it receives."""

    sent: torch.Tensor
    received: torch.Tensor

    @classmethod
    def made(cls, header: _Header, widest: int, num_ranks: int, device: str) -> _Buffers:
        dtype = _DTYPES[header.dtype]
        return cls(
            torch.zeros(widest, *header.shape, dtype=dtype, device=device),
            torch.empty(num_ranks, widest, *header.shape, dtype=dtype, device=device),
        )


class Exchange:
    """See `Ranks`."""

    def __init__(
        self, rank: int, num_ranks: int, device: str, *, on_host: Gather, on_device: Gather
    ) -> None:
        self.rank = rank
        self._num_ranks = num_ranks
        self._device = device
        self._on_host = on_host
        self._on_device = on_device
        self._agreed = 0
        """Identity of the last error that all ranks raise."""

    def __repr__(self) -> str:
        return f"<Exchange rank={self.rank} of {self._num_ranks} on {self._device}>"

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        token = _is_apart.set(True)
        try:
            yield
        finally:
            _is_apart.reset(token)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if id(error) != self._agreed and not _is_apart.get():
                raise RanksLostError(f"rank {self.rank} alone failed: {error!r}") from error
            raise

    def all_or_none(self, work: Callable[[], T]) -> T:
        if _is_apart.get():
            return work()
        try:
            result = work()
        except Exception as error:
            self._meet(_Header(_Point.DONE), error)
            raise
        self._meet(_Header(_Point.DONE), None)
        return result

    def share_rows(self, num_rows: int, compute: Compute) -> list[torch.Tensor]:
        if _is_apart.get():
            return list(compute(range(num_rows)))
        parts = shares(num_rows, self._num_ranks)
        mine, widest = parts[self.rank], len(parts[0])
        buffers: _Buffers | None = None
        header = _Header(_Point.ROWS)
        try:
            if mine:
                rows = compute(mine)
                header = _header_of(rows[0])
                buffers = _Buffers.made(header, widest, self._num_ranks, self._device)
                for i, row in enumerate(rows):
                    buffers.sent[i : i + 1] = row
        except Exception as error:
            self._meet(_Header(_Point.ROWS), error)
            raise
        headers = self._meet(header, None)
        if not parts[-1]:
            buffers = self._with_room(buffers, headers[0], widest)
        assert buffers is not None, "who had rows has made its buffers"
        self._transfer(self._on_device, buffers.received, buffers.sent)
        return [
            buffers.received[rank, i : i + 1]
            for rank, part in enumerate(parts)
            for i in range(len(part))
        ]

    def _with_room(self, buffers: _Buffers | None, header: _Header, widest: int) -> _Buffers:
        """Who had no rows learns how large the others' are, and says whether it has room."""
        try:
            made = buffers or _Buffers.made(header, widest, self._num_ranks, self._device)
        except Exception as error:
            self._meet(_Header(_Point.ROOM), error)
            raise
        self._meet(_Header(_Point.ROOM), None)
        return made

    def _meet(self, header: _Header, error: Exception | None) -> list[_Header]:
        """Wait for everybody, and hear how each stands.

        Raises:
            Exception: somebody failed; the same kind on every rank.
            RanksLostError: they did not meet at the same place.
        """
        standing = _standing(error)
        numbers = _Header(header.point, standing, header.dtype, header.shape).numbers()
        told = torch.tensor(numbers)
        heard = torch.empty(self._num_ranks, len(numbers), dtype=told.dtype)
        self._transfer(self._on_host, heard, told)
        headers = [_Header.of(one) for one in heard.tolist()]
        if len({one.point for one in headers}) > 1:
            raise RanksLostError(f"the ranks are at different places: {headers}")
        worst = max(one.standing for one in headers)
        if worst != _Standing.FINE:
            self._raise(_Standing(worst), standing, error, headers)
        made = {(one.dtype, one.shape) for one in headers if one.shape}
        if len(made) > 1:
            raise RanksLostError(f"the ranks made rows of different shapes: {headers}")
        return headers

    def _raise(
        self,
        worst: _Standing,
        own: _Standing,
        error: Exception | None,
        headers: Sequence[_Header],
    ) -> None:
        """Raise this rank's own error where it is of the worst kind, else that of another rank."""
        text = ""
        if any(one.standing != worst for one in headers):  # the same answer on every rank
            text = self._text_of(headers, worst, error)
        raised: Exception = PeerFailedError(text)
        if error is not None and own is worst:
            raised = error
        elif worst is _Standing.STARVED:
            raised = torch.OutOfMemoryError(text)
        self._agreed = id(raised)
        if raised is error:
            raise raised
        raise raised from None

    def _text_of(
        self, headers: Sequence[_Header], worst: _Standing, error: Exception | None
    ) -> str:
        told = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
        text = f"{type(error).__name__}: {error}".encode()[:_TEXT_BYTES] if error else b""
        told[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        heard = torch.empty(self._num_ranks, _TEXT_BYTES, dtype=torch.uint8)
        self._transfer(self._on_host, heard, told)
        rank = next(i for i, one in enumerate(headers) if one.standing == worst)
        said = bytes(heard[rank].tolist()).rstrip(b"\0").decode(errors="replace")
        return f"rank {rank}: {said}"

    def _transfer(self, gather: Gather, received: torch.Tensor, sent: torch.Tensor) -> None:
        try:
            gather(received, sent)
        except RuntimeError as error:
            raise RanksLostError(f"rank {self.rank} lost the others: {error}") from error


def _standing(error: Exception | None) -> _Standing:
    if error is None:
        return _Standing.FINE
    return _Standing.STARVED if is_out_of_memory(error) else _Standing.FAILED


def _header_of(row: torch.Tensor) -> _Header:
    assert 1 < row.dim() <= _MAX_DIMS, f"no row of a prediction: {row.shape}"
    return _Header(
        _Point.ROWS, _Standing.FINE, _DTYPES.index(row.dtype), tuple(map(int, row.shape[1:]))
    )
