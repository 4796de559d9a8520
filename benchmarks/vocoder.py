"""What a vocoder of codes costs for each frame, by ramp of chunks, against its reference.

    python tools/make_tiny.py qwen3_omni OUT && python benchmarks/vocoder.py OUT
    python tools/make_tiny.py qwen3_omni OUT --scale real
    python benchmarks/vocoder.py OUT --device cuda --dummy-weights --batch 1 8 32

Both run in turn, in one process. The reference decodes the whole of the same codes at once, which
is the least it can cost: a ratio of 1.5 says that streaming costs half as much again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_omni.config.pipeline import Modality, StageConfig
from vllm_omni.config.registry import load_pipeline
from vllm_omni.generation.model import ModelContext, OneShotModel, Work
from vllm_omni.model_executor.models.common.code_stream import END_OF_CODES
from vllm_omni.model_executor.models.common.part_weights import load_part
from vllm_omni.model_executor.models.common.vocoder import VocoderOptions, read_part_config


def main() -> int:
    arguments = _arguments()
    config = json.loads((arguments.model_dir / "config.json").read_text(encoding="utf-8"))
    model_type = config["model_type"]
    stages = load_pipeline(model_type, arguments.model_dir).stages
    stage = next(stage for stage in stages if stage.emits is Modality.AUDIO)
    reference, groups = REFERENCES[model_type](arguments.model_dir, _context(stage, arguments, [1]))
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 2048, (arguments.frames, groups), dtype=np.int32)
    rows = []
    for text in arguments.ramp:
        ramp = [int(size) for size in text.split(",")]
        model = _model(stage, _context(stage, arguments, ramp))
        model.self_test()
        for batch in arguments.batch:
            rows.append(_row(model, reference, codes, batch, arguments.repeats) | {"ramp": ramp})
            print(
                "ramp {ramp} batch {batch}: {ms_per_frame:.3f} ms a frame, {ratio:.2f} of the "
                "reference's {reference_ms_per_frame:.3f}; first chunk {first_ms:.2f} ms, "
                "others {chunk_ms_p50:.2f} (at most {chunk_ms_max:.2f})".format(**rows[-1])
            )
    if arguments.json:
        print(json.dumps({"stage": stage.name, "device": arguments.device, "rows": rows}))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Cost of a vocoder by frame and ramp.")
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--ramp", nargs="+", default=["1", "2", "4", "8", "25", "1,2,4,8"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--frames", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dummy-weights", action="store_true")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _context(stage: StageConfig, arguments: argparse.Namespace, ramp: list[int]) -> ModelContext:
    options = dict(stage.engine_defaults) | {"chunk_ramp": ramp}
    if arguments.dtype:
        options["dtype"] = arguments.dtype
    if arguments.dummy_weights:
        options["load_format"] = "dummy"
    return ModelContext(
        model_dir=arguments.model_dir,
        device=arguments.device,
        num_threads=arguments.threads,
        options=options,
    )


def _model(stage: StageConfig, context: ModelContext) -> OneShotModel:
    module, _, name = (stage.model_class or "").partition(":")
    model: OneShotModel = getattr(importlib.import_module(module), name)(context)
    return model


def _row(
    model: OneShotModel,
    reference: Callable[[np.ndarray[Any, Any]], object],
    codes: np.ndarray[Any, Any],
    batch: int,
    repeats: int,
) -> dict[str, Any]:
    streamed, whole, chunks = [], [], []
    all_codes = np.stack([codes] * batch)
    reference(all_codes)
    for _ in range(repeats):
        chunks = _stream(model, codes, batch)
        streamed.append(sum(chunks))
        begin = time.perf_counter()
        reference(all_codes)
        whole.append(time.perf_counter() - begin)
    frames = batch * len(codes)
    return {
        "batch": batch,
        "ms_per_frame": 1e3 * statistics.median(streamed) / frames,
        "reference_ms_per_frame": 1e3 * statistics.median(whole) / frames,
        "ratio": statistics.median(streamed) / statistics.median(whole),
        "first_ms": 1e3 * chunks[0],
        "chunk_ms_p50": 1e3 * statistics.median(chunks),
        "chunk_ms_max": 1e3 * max(chunks),
    }


def _stream(model: OneShotModel, codes: np.ndarray[Any, Any], batch: int) -> list[float]:
    """Seconds of every forward that gave sound, for requests that write in step; the samples are
    on the host when it returns. Forwards that only keep a frame are in the next one's time."""
    states = [model.start(None, None)[0] for _ in range(batch)]
    seconds, begin = [], time.perf_counter()
    for step in range(len(codes) + 1):
        is_last = step == len(codes)
        item = END_OF_CODES if is_last else codes[step : step + 1]
        results = model.forward([Work(state, item, is_last=is_last) for state in states])
        for result in results:
            if isinstance(result, BaseException):
                raise result
        if results[0] is not None:
            seconds.append(time.perf_counter() - begin)
            begin = time.perf_counter()
    for state in states:
        model.finish(state)
    return seconds


def _code2wav(model_dir: Path, context: ModelContext) -> tuple[Callable[..., object], int]:
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

    options = VocoderOptions.read(context)
    config = read_part_config(model_dir, "code2wav_config")
    model = load_part(
        lambda: Qwen3OmniMoeCode2Wav(config),
        model_dir,
        "code2wav.",
        dtype=options.dtype,
        device=options.device,
        random=options.has_random_weights,
    )

    @torch.inference_mode()
    def decode(codes: np.ndarray[Any, Any]) -> object:
        given = torch.from_numpy(codes.astype(np.int64)).to(options.device).transpose(1, 2)
        return model.chunked_decode(given).float().cpu()

    return decode, int(config.num_quantizers)


def _token2wav(model_dir: Path, context: ModelContext) -> tuple[Callable[..., object], int]:
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

    options = VocoderOptions.read(context, more=("num_steps",))
    config = read_part_config(model_dir, "token2wav_config")
    config._attn_implementation = "sdpa"
    model = load_part(
        lambda: Qwen2_5OmniToken2WavModel(config),
        model_dir,
        "token2wav.",
        dtype=options.dtype,
        device=options.device,
        random=options.has_random_weights,
    )
    voice = next(iter(torch.load(model_dir / "spk_dict.pt", weights_only=True).values()))

    @torch.inference_mode()
    def decode(codes: np.ndarray[Any, Any]) -> object:
        given = torch.from_numpy(codes[..., 0].astype(np.int64)).to(options.device)
        return model(
            given,
            conditioning=voice["cond"].to(options.device).expand(len(given), -1),
            reference_mel=voice["ref_mel"].to(options.device).expand(len(given), -1, -1),
            num_steps=options.more["num_steps"],
        )

    return decode, 1


REFERENCES: dict[str, Callable[[Path, ModelContext], tuple[Callable[..., object], int]]] = {
    "qwen3_omni_moe": _code2wav,
    "qwen2_5_omni": _token2wav,
}


if __name__ == "__main__":
    raise SystemExit(main())
