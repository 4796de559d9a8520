"""Which tokens of the thinker's prompt the talker hears: the user's turns and the reply's head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring positions of the user's turns that are all text or all media."""

    is_media: bool
    positions: Ids
    token_ids: Ids


@dataclass(frozen=True, slots=True)
class Turns:
    """The parts of one prompt."""

    user: Ids
    """Positions of the user's turns in the prompt, ascending."""
    user_ids: Ids
    is_media: npt.NDArray[np.bool_]
    """Of the user's positions: a placeholder that media fill."""
    is_heard: npt.NDArray[np.bool_]
    """Of the user's positions: media of a video that is heard too."""
    reply: Ids
    """Token ids from the head of the last assistant's turn on."""

    @property
    def num_user(self) -> int:
        return len(self.user)

    @property
    def media_positions(self) -> list[int]:
        positions: list[int] = self.user[self.is_media].tolist()
        return positions

    def user_runs(self) -> Iterator[Run]:
        """The user's turns, cut where text and media meet."""
        if not len(self.user):
            return
        cuts = np.flatnonzero(self.is_media[1:] != self.is_media[:-1]) + 1
        for indices in np.split(np.arange(len(self.user)), cuts):
            yield Run(bool(self.is_media[indices[0]]), self.user[indices], self.user_ids[indices])

    def positions_heard(self, positions: Ids, num_after: int) -> Ids:
        """Rotary positions of the talker's prompt, from those of the thinker's.

        A turn begins with a word, where all axes are equal, and its inner distances do not depend
        on what stands before it: the turns are moved together, and what follows counts on. The
        reference does not tell its talker that a video is heard, so there it counts every token.
        """
        moved = positions[:, self.user]
        begins = np.diff(self.user, prepend=-2) != 1
        begins |= self.is_heard | np.append(False, self.is_heard[:-1])
        following = 0
        for piece in np.split(moved, np.flatnonzero(begins)[1:], axis=1) if moved.size else ():
            piece += following - piece[:, 0].max()
            piece[:, 0] = following
            following = int(piece.max()) + 1
        after = np.tile(np.arange(following, following + num_after), (3, 1))
        heard: Ids = np.concatenate([moved, after], axis=1)
        return heard


def turns_of(prompt: Ids, config: Any) -> Turns:
    """Find the turns of a prompt that the chat template wrote.

    Raises:
        ValueError: it has no assistant's turn to speak.
    """
    starts = np.flatnonzero(prompt[:-1] == config.im_start_token_id)
    roles = prompt[starts + 1]
    replies = starts[roles == config.assistant_token_id]
    if not len(replies):
        raise ValueError("a spoken reply needs a chat whose last turn is the assistant's")
    ends = np.append(starts[1:], len(prompt))
    turns = [
        np.arange(start, end)
        for start, end, role in zip(starts, ends, roles, strict=True)
        if role == config.user_token_id
    ]
    user = np.concatenate(turns) if turns else np.empty(0, dtype=np.int64)
    media = (config.audio_token_id, config.image_token_id, config.video_token_id)
    user_ids = prompt[user]
    is_media = np.isin(user_ids, media)
    is_heard = np.zeros_like(is_media)
    starts = np.flatnonzero(is_media & ~np.append(False, is_media[:-1]))
    ends = np.flatnonzero(is_media & ~np.append(is_media[1:], False)) + 1
    for start, end in zip(starts, ends, strict=True):
        marks = user_ids[max(start - 2, 0) : start].tolist()
        is_heard[start:end] = marks == [config.vision_start_token_id, config.audio_start_token_id]
    return Turns(user, user_ids, is_media, is_heard, prompt[replies[-1] :])
