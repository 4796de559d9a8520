"""The data folder of one server: its lock, and the files of each video. Blocks."""

from __future__ import annotations

import contextlib
import enum
import fcntl
import hashlib
import os
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from vllm_omni import envs
from vllm_omni.entrypoints.openai.media.video import spritesheet, thumbnail
from vllm_omni.entrypoints.openai.videos.record import is_video_id
from vllm_omni.errors import ConfigError
from vllm_omni.outputs.media import Frames
from vllm_omni.outputs.video_file import write_mp4

TABLE_NAME: Final = "videos.sqlite"
_LOCK_NAME: Final = "lock"
_PART: Final = ".part"


class Variant(enum.StrEnum):
    """What can be read of a video."""

    VIDEO = "video"
    THUMBNAIL = "thumbnail"
    SPRITESHEET = "spritesheet"


_ENDINGS: Final = {
    Variant.VIDEO: (".mp4", "video/mp4"),
    Variant.THUMBNAIL: (".thumbnail.webp", "image/webp"),
    Variant.SPRITESHEET: (".spritesheet.jpg", "image/jpeg"),
}


def data_folder(args: Namespace, given: str | None) -> Path:
    """Where a server keeps what must outlive it: as told, else a folder for its port."""
    if given:
        return Path(given).expanduser()
    if (named := envs.data_dir()) is not None:
        return named
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    where = f"port-{args.port}"
    if args.uds:
        where = f"uds-{hashlib.sha256(args.uds.encode()).hexdigest()[:16]}"
    return Path(state).expanduser() / "vllm_omni" / where


class VideoFiles:
    """Files of videos in a folder that one server has to itself. Names come from our ids only."""

    def __init__(self, folder: Path) -> None:
        """Make the folder and lock it.

        Raises:
            ConfigError: it cannot be written, or another server has it.
        """
        self.table_path = folder / TABLE_NAME
        self._folder = folder / "videos"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._lock = (folder / _LOCK_NAME).open("w")
        except OSError as exc:
            raise ConfigError(
                f"the data folder '{folder}' cannot be used: {exc.strerror}; give --data-dir"
            ) from exc
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            self._lock.close()
            raise ConfigError(
                f"the data folder '{folder}' is in use by another server; give --data-dir"
            ) from exc

    def close(self) -> None:
        """Let another server have the folder."""
        self._lock.close()

    def path(self, video_id: str, variant: Variant) -> Path:
        assert is_video_id(video_id), "only our own ids name files"
        return self._folder / f"{video_id}{_ENDINGS[variant][0]}"

    @staticmethod
    def media_type(variant: Variant) -> str:
        return _ENDINGS[variant][1]

    def write(self, video_id: str, frames: Frames) -> None:
        """Write all variants beside their places; `keep` puts them there."""
        write_mp4(frames, self._part(video_id, Variant.VIDEO))
        self._part(video_id, Variant.THUMBNAIL).write_bytes(thumbnail(frames))
        self._part(video_id, Variant.SPRITESHEET).write_bytes(spritesheet(frames))

    def keep(self, video_id: str) -> int:
        """Put written files in their places; their bytes."""
        size_bytes = 0
        for variant in Variant:
            part, path = self._part(video_id, variant), self.path(video_id, variant)
            size_bytes += part.stat().st_size
            part.replace(path)
        return size_bytes

    def remove(self, video_id: str) -> None:
        """Delete what there is of a video."""
        for variant in Variant:
            for path in (self.path(video_id, variant), self._part(video_id, variant)):
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()

    def discard(self, video_id: str) -> None:
        """Delete what was written of a video that is not kept."""
        for variant in Variant:
            with contextlib.suppress(FileNotFoundError):
                self._part(video_id, variant).unlink()

    def sweep(self, known: Iterable[str]) -> None:
        """Delete files that no job has, and those that were not finished."""
        kept = set(known)
        for path in self._folder.iterdir():
            if path.name.partition(".")[0] not in kept or path.name.endswith(_PART):
                path.unlink()

    def _part(self, video_id: str, variant: Variant) -> Path:
        path = self.path(video_id, variant)
        return path.with_name(path.name + _PART)
