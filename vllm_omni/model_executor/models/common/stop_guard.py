"""Which tokens of a reply may be spoken when it ends at a stop string: those before the string.

The text is cut where it is detokenised, in another process and a few tokens later. So a stage that
speaks from tokens holds back those that may belong to a stop string.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@functools.cache
def load_tokenizer(folder: str) -> Tokenizer:
    """The tokenizer of a checkpoint; loaded once in a process."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))


class StopGuard:
    """Counts the tokens of one reply that may be spoken."""

    def __init__(self, context: Mapping[str, Any]) -> None:
        """`context`: that of the `StreamSource`. Without stop strings nothing is looked at."""
        stop = context.get("stop") or ()
        self._stop = [s for s in ([stop] if isinstance(stop, str) else stop) if s]
        self._include = bool(context.get("include_stop_str_in_output", False))
        self._skip_special = bool(context.get("skip_special_tokens", True))
        self._folder = str(context.get("tokenizer_dir", ""))
        self._num_held = max(map(len, self._stop), default=1) - 1
        self._text = ""
        self._starts: deque[int] = deque()
        """Where the text of each token that is held back begins."""
        self._limit: int | None = None
        """Length of the text before the stop string, once that was seen."""
        self._stream: Any = None

    def feed(self, token_ids: Sequence[int]) -> int:
        """Take the next tokens; returns how many more, the oldest first, may be spoken."""
        if not self._stop:
            return len(token_ids)
        for token_id in token_ids:
            self._starts.append(len(self._text))
            self._text += self._read(token_id)
            if self._limit is None:
                self._limit = self._find()
        safe = len(self._text) - self._num_held if self._limit is None else self._limit
        return self._release(safe)

    def end(self) -> int:
        """The reply is complete: how many of those held back may be spoken."""
        if self._limit is not None:
            return self._release(self._limit)
        num = len(self._starts)
        self._starts.clear()
        return num

    def _release(self, safe: int) -> int:
        num = 0
        while self._starts and self._starts[0] < safe:
            self._starts.popleft()
            num += 1
        return num

    def _find(self) -> int | None:
        found = [(at, s) for s in self._stop if (at := self._text.find(s)) >= 0]
        if not found:
            return None
        at, string = min(found, key=lambda hit: hit[0] + len(hit[1]))
        return at + len(string) if self._include else at

    def _read(self, token_id: int) -> str:
        from tokenizers.decoders import DecodeStream

        if self._stream is None:
            self._stream = DecodeStream(skip_special_tokens=self._skip_special)
        return self._stream.step(load_tokenizer(self._folder), token_id) or ""
