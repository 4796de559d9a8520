"""What the thinkers of all families are held to: the reference's tokens for prompts of any kind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY
from vllm import SamplingParams

from tests.parity.omni_prompts import NUM_TOKENS, Question, Reference, questions
from vllm_omni.entrypoints.omni import Omni
from vllm_omni.outputs.request_output import OmniRequestOutput

GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS)
ENGINE = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": 64 << 20}
HOW = {
    "as it comes": {},
    "in chunks": {"long_prefill_token_threshold": 48},
    "with little memory": {"block_size": 16, "num_gpu_blocks_override": 72},
}
"""Options of the engine: each seed runs under one of them."""


def without_voice(model_dir: Path) -> Path:
    """Mark a checkpoint as one that cannot speak, so that its thinker is all that starts."""
    path = model_dir / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "enable_audio_output": False}), encoding="utf-8")
    return model_dir


@contextmanager
def thinker(model_dir: Path, **options: Any) -> Iterator[Omni]:
    """The thinker of a checkpoint without a voice, in an engine of its own."""
    with Omni(model_dir, **{**ENGINE, **options}) as omni:
        yield omni


def ask(omni: Omni, *prompts: Any, params: Any = GREEDY) -> list[OmniRequestOutput]:
    """Whole answers; all prompts at once."""
    answers = omni.generate(list(prompts), params, output_modalities=["text"], use_tqdm=False)
    for answer in answers:
        assert answer.error is None, answer.error
    return answers


def tokens(answer: OmniRequestOutput) -> list[int]:
    """What the thinker wrote."""
    assert answer.request_output is not None
    return list(answer.request_output.outputs[0].token_ids)


def questions_for(how: str) -> dict[str, Question]:
    """All kinds where nothing is cut or repeated; one of each, and the hardest, elsewhere."""
    kinds = questions()
    if how == "as it comes":
        return kinds
    return {name: kinds[name] for name in ("text", "images", "audio", "video", "mixed-sounding")}


def check_parity(omni: Omni, reference: Reference, cases: dict[str, Question]) -> None:
    """Every question gets the reference's tokens, alone and with all others beside it."""
    expected = {name: reference.answer(question) for name, question in cases.items()}
    prompts = {name: case.prompt(reference.text(case)) for name, case in cases.items()}
    together = ask(omni, *prompts.values())
    for (name, (prompt, written)), answer in zip(expected.items(), together, strict=True):
        assert answer.request_output.prompt_token_ids == prompt, f"{name}: the prompt"
        assert tokens(answer) == written, name
    for name, prompt in prompts.items():
        # What others left in the prefix cache must not show.
        assert tokens(ask(omni, prompt)[0]) == expected[name][1], f"{name}, alone"


def num_preemptions() -> float:
    """Requests that gave their memory to others and were computed again, in this process's life."""
    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    return sum(s.value for s in samples if s.name == "vllm:num_preemptions_total")
