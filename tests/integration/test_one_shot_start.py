"""A one-shot replica that cannot start says why, and is given the time it needs."""

from __future__ import annotations

import pytest

from tests.generation.replicas import running, tone_spec
from vllm_omni.engine.one_shot_client import OneShotClient
from vllm_omni.errors import StageStartError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"engine_args": {"load": "fail"}},
            "stage voice/0 did not start: OSError: no weights in this folder",
        ),
        (
            {"engine_args": {"self_test": "fail"}},
            "stage voice/0 did not start: RuntimeError: the self-test gave silence",
        ),
        (
            {"engine_args": {"lode": 1}},
            "stage voice/0 did not start: ConfigError: unknown option 'lode'",
        ),
        (
            {"model_class": "tests.generation.tone:Missing"},
            "stage voice/0 did not start: ConfigError: model class "
            "'tests.generation.tone:Missing' cannot be loaded: "
            "module 'tests.generation.tone' has no attribute 'Missing'",
        ),
    ],
)
async def test_a_replica_that_cannot_start_says_why(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(StageStartError) as error:
        await OneShotClient.start(tone_spec(**changes))

    assert str(error.value) == message


async def test_loading_takes_as_long_as_it_moves() -> None:
    options = {"load": "work", "load_s": 2.0}
    async with running(engine_args=options, start_timeout_s=1.0) as client:
        client.check_health()

    with pytest.raises(StageStartError, match=r"no progress .* while loading the model"):
        await OneShotClient.start(tone_spec(engine_args={"load": "hang"}, start_timeout_s=1.0))
