"""What a server's processes hold while it works: memory, open files, /dev/shm, and their trend."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from benchmarks.served import descendants, title

TITLE: Final = "vllm-omni: "
API: Final = "api"


@dataclass(frozen=True, slots=True)
class Sample:
    at: float
    """Where on the axis that the trend is taken along: seconds, or requests."""
    rss_bytes: int
    num_files: int


@dataclass(slots=True)
class ProcessWatch:
    """Samples of the API process and of every replica's process below it."""

    server_pid: int
    samples: dict[tuple[str, int], list[Sample]] = field(default_factory=lambda: defaultdict(list))
    """By name (`api`, `voice/0`) and process id: a restarted replica is another process."""
    shared_bytes: list[tuple[float, int]] = field(default_factory=list)

    def sample(self, at: float, ready: Collection[str] | None = None) -> None:
        """Take a sample of the API process and of the replicas in `ready`, or of all."""
        for name, pid in named_processes(self.server_pid):
            if ready is not None and name != API and name not in ready:
                continue  # it loads
            try:
                process = psutil.Process(pid)
                rss_bytes, num_files = process.memory_info().rss, process.num_fds()
            except psutil.Error:
                continue  # it has just ended
            self.samples[name, pid].append(Sample(at, rss_bytes, num_files))
        self.shared_bytes.append((at, shared_memory_bytes()))

    def longest(self) -> dict[str, list[Sample]]:
        """By name the samples of the process that was seen most often."""
        found: dict[str, list[Sample]] = {}
        for (name, _), samples in self.samples.items():
            if len(samples) > len(found.get(name, ())):
                found[name] = samples
        return dict(sorted(found.items()))

    def shared_growth_bytes(self) -> int:
        """What came to lie in /dev/shm from the first sample to the last."""
        return self.shared_bytes[-1][1] - self.shared_bytes[0][1] if self.shared_bytes else 0


def named_processes(server_pid: int) -> list[tuple[str, int]]:
    """The API process and the replicas, by name. Only what carries its title already."""
    found = [(API, server_pid)]
    for pid in descendants(server_pid):
        text = title(pid)
        if text.startswith(TITLE) and "/" in text:
            found.append((text.removeprefix(TITLE).strip(), pid))
    return found


def shared_memory_bytes() -> int:
    """All that lies in /dev/shm."""
    total = 0
    for path in Path("/dev/shm").rglob("*"):
        try:
            total += path.stat().st_blocks * 512
        except OSError:
            continue
    return total


def rss_slope(samples: Sequence[Sample]) -> float:
    """Bytes per unit of the axis, by least squares; 0 for fewer than three samples."""
    if len(samples) < 3:
        return 0.0
    places = [sample.at for sample in samples]
    return statistics.linear_regression(places, [sample.rss_bytes for sample in samples]).slope


def later_half(samples: Sequence[Sample]) -> Sequence[Sample]:
    """What came after the warm-up: a process that grows here grows for ever."""
    return samples[len(samples) // 2 :]


def file_growth(samples: Sequence[Sample]) -> int:
    """Open files at the end beyond those at the beginning: the least of three each time, since
    what is under way has files too."""
    counts = [sample.num_files for sample in samples]
    return min(counts[-3:]) - min(counts[:3]) if counts else 0
