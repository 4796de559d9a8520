"""The requests of one replica and where each stands. No clock, lock or tensor."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from vllm_omni.diffusion.sched.decisions import (
    Item,
    MediaState,
    MediaWork,
    Phase,
    next_batch,
    next_media_work,
    wants_preview,
)


class ItemTable:
    """Who waits, and who was begun. What costs time looks at the begun ones only: their number is
    bounded, that of the waiting is not."""

    def __init__(self, max_batch_size: int, max_prepared: int) -> None:
        self._max_batch_size = max_batch_size
        self._max_prepared = max_prepared
        self._waiting: OrderedDict[str, Item] = OrderedDict()
        self._begun: dict[str, Item] = {}
        self._last_turn: dict[Hashable, int] = {}
        self._num_turns = 0
        self._num_arrived = 0

    def __repr__(self) -> str:
        phases = " ".join(f"{item.request_id}:{item.phase}" for item in self._begun.values())
        return f"<ItemTable waiting={len(self._waiting)} [{phases}]>"

    def __len__(self) -> int:
        return len(self._waiting) + len(self._begun)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._begun or request_id in self._waiting

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_begun(self) -> int:
        return len(self._begun)

    def add(self, request_id: str, preview_interval: int | None = None) -> None:
        """A request has come; it waits."""
        self._waiting[request_id] = Item(
            request_id, self._num_arrived, preview_interval=preview_interval
        )
        self._num_arrived += 1

    def get(self, request_id: str) -> Item | None:
        """A request that was begun; None when it is gone."""
        return self._begun.get(request_id)

    def remove(self, request_id: str) -> None:
        """It is over, whatever way."""
        self._waiting.pop(request_id, None)
        self._begun.pop(request_id, None)
        if not self._begun:
            self._last_turn.clear()

    def begin(self, item: Item, phase: Phase) -> None:
        """Work on a waiting request begins."""
        del self._waiting[item.request_id]
        item.phase = phase
        self._begun[item.request_id] = item

    def next_waiting(self) -> Item | None:
        """Who came first of those for whom nothing was done."""
        return next(iter(self._waiting.values()), None)

    def take_batch(self) -> list[Item]:
        """Who takes the next step together; from now on they are in it."""
        runnable = [item for item in self._begun.values() if item.phase is Phase.RUNNABLE]
        batch = next_batch(runnable, self._last_turn, self._max_batch_size)
        if batch:
            self._num_turns += 1
            self._last_turn[batch[0].key] = self._num_turns
            self._forget_keys()
        for item in batch:
            item.phase = Phase.STEPPING
        return batch

    def _forget_keys(self) -> None:
        if len(self._last_turn) > 2 * self._max_prepared:
            live = {item.key for item in self._begun.values()}
            self._last_turn = {k: turn for k, turn in self._last_turn.items() if k in live}

    def next_media_work(self) -> tuple[MediaWork, Item] | None:
        """What to do next beside the denoise steps."""
        begun = self._begun.values()
        state = MediaState(
            next_waiting=self.next_waiting(),
            num_prepared=len(begun),
            num_steppable=sum(
                item.phase in (Phase.PREPARING, Phase.RUNNABLE, Phase.STEPPING) for item in begun
            ),
            denoised=[item for item in begun if item.phase is Phase.DENOISED],
            preview=next((item for item in begun if wants_preview(item)), None),
        )
        return next_media_work(state, self._max_batch_size, self._max_prepared)
