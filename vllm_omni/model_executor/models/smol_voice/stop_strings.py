"""Stop strings in streamed text: found whatever tokens they are spread over, and held back."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on up to the first stop string, as vLLM does for the text it returns."""

    def __init__(self, stop: Sequence[str], *, include: bool) -> None:
        self._stop = [string for string in stop if string]
        self._include = include
        self._held = ""
        self._num_held = max((len(string) for string in self._stop), default=1) - 1
        self._found = False

    def feed(self, text: str) -> str:
        """Text that certainly comes before any stop string."""
        if self._found:
            return ""
        self._held += text
        if (end := self._end_of_text()) is not None:
            self._found = True
            out, self._held = self._held[:end], ""
            return out
        keep = len(self._held) - self._num_held
        if keep <= 0:
            return ""
        out, self._held = self._held[:keep], self._held[keep:]
        return out

    def end(self) -> str:
        """No more text: what was held back was not a stop string."""
        out, self._held = self._held, ""
        return out

    def _end_of_text(self) -> int | None:
        """Where the text ends for the earliest stop string; None when there is none."""
        found = [(at, s) for s in self._stop if (at := self._held.find(s)) >= 0]
        if not found:
            return None
        at, string = min(found, key=lambda hit: hit[0] + len(hit[1]))
        return at + len(string) if self._include else at
