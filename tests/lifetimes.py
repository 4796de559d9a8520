"""Programs that use the library, for tests of how they end: on the tone model, or on a tiny Llama.

    python -m tests.lifetimes omni|async_omni|text_omni starting|idle|busy PIPE [ending]

At its moment the program writes a word to PIPE. `ending` is what it does by itself after a line on
its input: `raise`, `exit`, `return`; without one it waits for a signal.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from vllm_omni.config.deploy import ResolvedConfig, ResolvedStage, ServerLimits, StageDeploy
from vllm_omni.config.pipeline import Modality, PipelineConfig, StageConfig, StageKind, Task

PIPELINE = PipelineConfig(
    model_type="test_tone",
    stages=(
        StageConfig(
            name="voice",
            kind=StageKind.ONE_SHOT,
            model_class="tests.generation.tone:ToneModel",
            emits=Modality.AUDIO,
        ),
    ),
    edges=(),
    entries={Task.SPEECH: "voice"},
)


def tone_config(num_replicas: int = 1, **engine_args: object) -> ResolvedConfig:
    """One stage that speaks in tones."""
    deploy = StageDeploy(
        num_replicas=num_replicas,
        devices=("cpu",) * num_replicas,
        num_threads=1,
        engine_args=engine_args,
    )
    (stage,) = PIPELINE.stages
    return ResolvedConfig(
        model_dir=Path("/nowhere"),
        pipeline=PIPELINE,
        stages=(ResolvedStage(stage_id=0, config=stage, deploy=deploy, model_dir=Path("/")),),
        limits=ServerLimits(),
    )


def llama_config() -> ResolvedConfig:
    """One stage of vLLM's that writes."""
    from tests.ar_replicas import ENGINE_ARGS
    from tests.tiny_models import make_tiny_llama

    folder = Path(tempfile.gettempdir()) / "llama"
    folder.mkdir()
    stage = StageConfig(name="thinker", kind=StageKind.AUTOREGRESSIVE, emits=Modality.TEXT)
    return ResolvedConfig(
        model_dir=make_tiny_llama(folder),
        pipeline=PipelineConfig(
            model_type="test_llama",
            stages=(stage,),
            edges=(),
            entries={Task.CHAT: "thinker"},
        ),
        stages=(
            ResolvedStage(
                stage_id=0,
                config=stage,
                deploy=StageDeploy(devices=("cpu",), num_threads=1, engine_args=dict(ENGINE_ARGS)),
                model_dir=folder,
            ),
        ),
        limits=ServerLimits(),
    )


def main(kind: str, moment: str, pipe: str, ending: str = "") -> None:
    # A test that runs in the background of a shell inherits that it is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options: dict[str, object] = {"load": "hang", "tell": pipe} if moment == "starting" else {}
    config = llama_config() if kind == "text_omni" else tone_config(**options)

    def now() -> None:
        with open(pipe, "w") as file:
            file.write(moment)

    program: Callable[..., None] = with_async_omni if kind == "async_omni" else with_omni
    program(config, moment, now, ending)


def with_omni(config: ResolvedConfig, moment: str, now: Callable[[], None], ending: str) -> None:
    from vllm_omni.entrypoints.omni import Omni

    omni = Omni(config=config)
    omni.generate("hello", use_tqdm=False)
    now()
    if moment == "busy":
        omni.generate("!sleep=600", task=Task.SPEECH, use_tqdm=False)
    end(ending)
    signal.pause()


def with_async_omni(
    config: ResolvedConfig, moment: str, now: Callable[[], None], ending: str
) -> None:
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    async def run() -> None:
        omni = await AsyncOmni.create(config=config)
        async for _ in omni.generate("hello", task=Task.SPEECH):
            pass
        now()
        if moment == "busy":
            async for _ in omni.generate("!sleep=600", task=Task.SPEECH):
                pass
        end(ending)
        if not ending:
            await asyncio.Event().wait()

    asyncio.run(run())


def end(ending: str) -> None:
    if ending:
        sys.stdin.readline()  # whoever watches has seen the replicas alive
    if ending == "raise":
        raise RuntimeError("a bug of the user's")
    if ending in ("exit", "return"):
        sys.exit(3 if ending == "exit" else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
