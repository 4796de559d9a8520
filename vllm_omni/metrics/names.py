"""Every Prometheus series of this package, in one table."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

PREFIX: Final = "vllm_omni_"

STAGE: Final = "stage"
REPLICA: Final = "replica"

_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0)
_REAL_TIME_FACTORS: Final = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0, 1.2, 1.5, 2.0, 5.0)
_AUDIO_SECONDS: Final = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)


class Kind(enum.StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Series:
    """One series; `name` is without the prefix, and without `_total` for a counter."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


REQUESTS: Final = Series(
    "requests",
    Kind.COUNTER,
    "Requests that left a stage, by how: finished, failed or aborted.",
    (STAGE, "reason"),
)
SUBMITTED: Final = Series(
    "requests_submitted", Kind.COUNTER, "Requests given to a replica of a stage.", (STAGE,)
)
REJECTED: Final = Series(
    "requests_rejected", Kind.COUNTER, "Requests that admission refused, by reason.", ("reason",)
)
RESUBMITTED: Final = Series(
    "requests_resubmitted",
    Kind.COUNTER,
    "Requests submitted again, since their replica of this stage died before they had output.",
    (STAGE,),
)
IN_FLIGHT: Final = Series(
    "requests_in_flight", Kind.GAUGE, "Requests in a stage, running or waiting.", (STAGE,)
)
RUNNING: Final = Series(
    "requests_running",
    Kind.GAUGE,
    "Requests that a replica computes for, when it last said so.",
    (STAGE, REPLICA),
)
WAITING: Final = Series(
    "requests_waiting",
    Kind.GAUGE,
    "Requests queued in a replica, when it last said so.",
    (STAGE, REPLICA),
)
FIRST_OUTPUT: Final = Series(
    "time_to_first_output_seconds",
    Kind.HISTOGRAM,
    "Time from a request's arrival to the first output of a stage; TTFT for a text stage.",
    (STAGE,),
    _SECONDS,
)
FIRST_AUDIO: Final = Series(
    "time_to_first_audio_seconds",
    Kind.HISTOGRAM,
    "Time from a request's arrival to its first samples.",
    (),
    _SECONDS,
)
REAL_TIME_FACTOR: Final = Series(
    "real_time_factor",
    Kind.HISTOGRAM,
    "Time a stage took for a request's audio, by the length of that audio; below 1 keeps up.",
    (STAGE,),
    _REAL_TIME_FACTORS,
)
AUDIO_SECONDS: Final = Series(
    "audio_seconds", Kind.COUNTER, "Length of all audio a stage has written.", (STAGE,)
)
AUDIO_LENGTH: Final = Series(
    "audio_length_seconds",
    Kind.HISTOGRAM,
    "Length of one request's audio.",
    (STAGE,),
    _AUDIO_SECONDS,
)
UNDER_RUNS: Final = Series(
    "audio_under_runs",
    Kind.COUNTER,
    "Silences in streamed audio: samples were sent when all before had played.",
    (STAGE,),
)
UNDER_RUN_SECONDS: Final = Series(
    "audio_under_run_seconds", Kind.COUNTER, "Length of these silences.", (STAGE,)
)
REPLICA_STATE: Final = Series(
    "replica_state",
    Kind.GAUGE,
    "1 for the state a replica is in, 0 for the others.",
    (STAGE, REPLICA, "state"),
)
RESTARTS: Final = Series(
    "replica_restarts",
    Kind.COUNTER,
    "Times a replica served again after it had died or was restarted.",
    (STAGE, REPLICA),
)
START_SECONDS: Final = Series(
    "replica_start_seconds",
    Kind.GAUGE,
    "How long a replica's latest start took, from its spawn to its first request; 0 before one.",
    (STAGE, REPLICA),
)

ALL: Final = (
    REQUESTS,
    SUBMITTED,
    REJECTED,
    RESUBMITTED,
    IN_FLIGHT,
    RUNNING,
    WAITING,
    FIRST_OUTPUT,
    FIRST_AUDIO,
    REAL_TIME_FACTOR,
    AUDIO_SECONDS,
    AUDIO_LENGTH,
    UNDER_RUNS,
    UNDER_RUN_SECONDS,
    REPLICA_STATE,
    RESTARTS,
    START_SECONDS,
)

REPLICA_STATES: Final = ("starting", "ready", "draining", "backoff", "stopped")
FINISH_REASONS: Final = ("finished", "failed", "aborted")
REJECT_REASONS: Final = ("overloaded", "stopped")
