"""Accelerations on a tiny random model: off equals reference, on does something, no leaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.diffusion.bench import request
from tests.diffusion.replicas import stripe_spec
from vllm_omni.diffusion.accelerations.offload import offload_groups
from vllm_omni.diffusion.executor.jobs import Decode, Made, Prepare, Prepared, Step
from vllm_omni.diffusion.models.qwen_image import diffusion_pipeline
from vllm_omni.diffusion.models.qwen_image.tiny import make_tiny
from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.diffusion.worker.worker import Worker
from vllm_omni.errors import ConfigError

pytestmark = pytest.mark.slow  # compiles, and leaves the compiler's processes to the end

Draw = Callable[..., NDArray[np.uint8]]
SIZE = {"height": 64, "width": 64, "num_inference_steps": 6}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), seed=3)


@pytest.fixture(scope="module")
def plain(model_dir: Path) -> Worker:
    return make_worker(model_dir)


def make_worker(model_dir: Path, **engine_args: object) -> Worker:
    spec = stripe_spec(
        model_dir=model_dir,
        model_class="vllm_omni.diffusion.models.qwen_image.diffusion_pipeline:QwenImage",
        engine_args=engine_args,
    )
    return Worker(spec, lambda what: None)


def draw_all(worker: Worker, requests: Sequence[DiffusionRequest]) -> list[NDArray[np.uint8]]:
    """Steps of all requests in turn, one request per forward."""
    return [_pixels(one) for one in make_all(worker, requests)]


def make_all(worker: Worker, requests: Sequence[DiffusionRequest]) -> list[object]:
    """What becomes of requests that take their steps in turn."""
    runner, left = worker.runner, {}
    for one in requests:
        prepared = runner.run(Prepare(one), _ignore)
        assert isinstance(prepared, Prepared)
        assert prepared.failure is None, prepared.failure
        left[one.request_id] = prepared.num_steps
    while any(left.values()):
        for request_id in [i for i, steps in left.items() if steps]:
            runner.run(Step((request_id,)), _ignore)
            left[request_id] -= 1
    return [runner.run(Decode(one.request_id), _ignore) for one in requests]


def _ignore(result: object) -> None:
    pass


def _pixels(made: object) -> NDArray[np.uint8]:
    assert isinstance(made, Made)
    assert made.pixels is not None, made.failure
    return made.pixels


def draw(worker: Worker, prompt: str = "a cat", **fields: Any) -> NDArray[np.uint8]:
    [pixels] = draw_all(worker, [request("r", prompt, **SIZE | fields)])
    return pixels


def distance(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> int:
    return int(np.abs(a.astype(int) - b.astype(int)).max())


def test_a_lossless_request_is_not_touched_by_the_step_cache(
    model_dir: Path, plain: Worker
) -> None:
    cached = make_worker(model_dir, step_cache="first_block", step_cache_threshold=10.0)

    assert np.array_equal(draw(cached, quality="lossless"), draw(plain))
    assert not np.array_equal(draw(cached), draw(plain))
    assert cached.max_batch_size == 1


def test_what_the_step_cache_remembers_stays_with_its_request(model_dir: Path) -> None:
    cached = make_worker(model_dir, step_cache="first_block", step_cache_threshold=0.3)
    requests = [
        request("a", "a cat", **SIZE | {"seed": 1}),
        request("b", "a dog in the snow", **SIZE | {"seed": 2, "num_inference_steps": 4}),
        request("c", "a house", **SIZE | {"width": 96}),
    ]
    together = draw_all(cached, requests)
    alone = [draw_all(cached, [one])[0] for one in requests]
    fresh = make_worker(model_dir, step_cache="first_block", step_cache_threshold=0.3)

    assert all(map(np.array_equal, together, alone))
    assert all(
        np.array_equal(draw_all(fresh, [one])[0], pixels)
        for one, pixels in zip(reversed(requests), reversed(alone), strict=True)
    )
    assert cached.attachments.num_remembered == 0


@pytest.mark.parametrize("step_cache", ["none", "first_block"])
def test_large_rows_of_unlike_texts_take_forwards_of_their_own(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, step_cache: str
) -> None:
    """The picture stays what it is, and so does what is remembered of each row."""
    worker = make_worker(model_dir, step_cache=step_cache, step_cache_threshold=10.0)
    guided = {"negative_prompt": "blurry, with many words about it", "true_cfg_scale": 4.0}
    num_rows: list[int] = []
    [transformer] = worker.pipeline.components.denoisers.values()
    transformer.register_forward_pre_hook(
        lambda module, args, given: num_rows.append(len(given["hidden_states"])), with_kwargs=True
    )
    together = draw(worker, **guided)
    monkeypatch.setattr(diffusion_pipeline, "MAX_PADDED_TOKENS", 0)
    apart = draw(worker, **guided)

    assert num_rows == [2] * 6 + [1] * 12
    assert distance(apart, together) <= 1


def test_a_large_adapter_changes_the_picture_and_only_where_it_is_asked_for(
    model_dir: Path, plain: Worker, tmp_path: Path
) -> None:
    path = write_adapter(model_dir, tmp_path)
    adapted = make_worker(model_dir, lora_modules={"wild": str(path)})
    reference = draw(plain)

    assert np.array_equal(draw(adapted), reference)
    wild = draw(adapted, lora="wild")
    assert distance(wild, reference) > 1
    assert not np.array_equal(draw(adapted, lora="wild", lora_scale=0.5), wild)
    assert np.array_equal(draw(adapted), reference)
    assert np.array_equal(draw(adapted, lora="wild"), wild)


def test_requests_with_other_adapters_do_not_share_a_forward(
    model_dir: Path, tmp_path: Path
) -> None:
    path = write_adapter(model_dir, tmp_path)
    adapted = make_worker(model_dir, lora_modules={"wild": str(path)})
    keys = [
        adapted.runner.run(Prepare(request(str(i), "x", **SIZE | fields)), _ignore).key  # type: ignore[union-attr]
        for i, fields in enumerate(
            [{}, {"seed": 2}, {"lora": "wild"}, {"lora": "wild", "lora_scale": 0.5}]
        )
    ]

    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


def test_an_adapter_of_modulations_counts_for_its_requests_alone(
    model_dir: Path, plain: Worker, tmp_path: Path
) -> None:
    path = write_adapter(model_dir, tmp_path, ("img_mod.1", "txt_mod.1"))
    tabled, stepped = (
        make_worker(model_dir, lora_modules={"wild": str(path)}, modulations=way)
        for way in ("auto", "each_step")
    )
    requests = [
        request(str(i), "a cat", **SIZE, lora=lora) for i, lora in enumerate(("wild", None))
    ]
    wild, tame = draw_all(tabled, requests)

    assert np.array_equal(tame, draw(plain))
    assert distance(wild, tame) > 1
    assert distance(wild, draw(stepped, lora="wild")) <= 1


def write_adapter(
    model_dir: Path, folder: Path, targets: Sequence[str] = ("to_q", "to_k", "to_v")
) -> Path:
    """Random, and far from small."""
    from diffusers import QwenImagePipeline
    from peft import LoraConfig, get_peft_model_state_dict

    pipeline = QwenImagePipeline.from_pretrained(model_dir, local_files_only=True)
    config = LoraConfig(r=4, lora_alpha=4, target_modules=list(targets))
    pipeline.transformer.add_adapter(config)
    torch.manual_seed(0)
    state = get_peft_model_state_dict(pipeline.transformer)
    wild = {name: torch.randn_like(value) for name, value in state.items()}
    pipeline.save_lora_weights(folder, transformer_lora_layers=wild)
    return folder


def test_another_attention_backend_gives_the_same_picture(model_dir: Path, plain: Worker) -> None:
    other = make_worker(model_dir, attention_backend="_native_math")

    assert distance(draw(other), draw(plain)) <= 1


def test_weights_that_come_in_groups_give_the_same_picture(model_dir: Path, plain: Worker) -> None:
    grouped = make_worker(model_dir)
    offload_groups(grouped.pipeline.components, "cpu", use_stream=False)

    assert np.array_equal(draw(grouped), draw(plain))


def test_tiles_and_slices_are_switched_on(model_dir: Path, plain: Worker) -> None:
    tiled = make_worker(model_dir, vae_tiling="on", vae_slicing="on")
    vae: Any = tiled.pipeline.components.vae

    assert (vae.use_tiling, vae.use_slicing) == (True, True)
    assert np.array_equal(draw(tiled), draw(plain))  # smaller than a tile


def test_a_decode_in_tiles_for_want_of_memory_leaves_the_next_one_whole(plain: Worker) -> None:
    vae: Any = plain.pipeline.components.vae
    with plain.attachments.tiling(enabled=True):
        assert vae.use_tiling
    assert not vae.use_tiling


@pytest.mark.parametrize("works_in_tiles", [True, False])
def test_a_decode_without_memory_is_tried_in_tiles_and_costs_one_request_at_most(
    plain: Worker, monkeypatch: pytest.MonkeyPatch, works_in_tiles: bool
) -> None:
    vae: Any = plain.pipeline.components.vae
    tried: list[bool] = []
    decode = vae.decode

    def starved(*arguments: Any, **options: Any) -> Any:
        tried.append(vae.use_tiling)
        if vae.use_tiling and works_in_tiles:
            return decode(*arguments, **options)
        raise torch.OutOfMemoryError("no memory")

    whole = draw(plain)
    with monkeypatch.context() as patch:
        patch.setattr(vae, "decode", starved)
        [made] = make_all(plain, [request("r", "a cat", **SIZE)])

    assert isinstance(made, Made)
    assert tried == [False, True]
    if works_in_tiles:
        assert np.array_equal(_pixels(made), whole)  # smaller than a tile
    else:
        assert made.failure is not None
        assert made.failure.code == "out_of_memory"
    assert plain.runner.figures()["num_states"] == 0
    assert not vae.use_tiling
    assert np.array_equal(draw(plain), whole)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"offload": "group"}, "offload: group needs a GPU"),
        ({"attention_backend": "warp"}, "attention_backend 'warp'"),
        ({"lora_modules": {"x": "/nowhere"}}, "lora_modules.x: '/nowhere' does not exist"),
        ({"compile_sizes": ("512x512",)}, "compile_sizes: this replica compiles nothing"),
    ],
)
def test_what_cannot_be_done_stops_the_start(
    model_dir: Path, options: dict[str, object], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        make_worker(model_dir, **options)


@pytest.mark.parametrize("option", ["step_cache", "lora_modules", "vae_tiling", "vae_slicing"])
def test_a_model_that_cannot_do_it_refuses(option: str) -> None:
    value = {"step_cache": "first_block", "lora_modules": {"x": "/"}}.get(option, "on")
    spec = stripe_spec(
        model_class="tests.diffusion.stripes:WholePipeline", engine_args={option: value}
    )

    if option == "vae_tiling":
        Worker(spec, lambda what: None)  # its VAE can
        return
    with pytest.raises(ConfigError, match=option):
        Worker(spec, lambda what: None)


@pytest.mark.thorough  # the compiler takes a minute
@pytest.mark.timeout(400)
def test_compiled_blocks_give_the_same_picture(model_dir: Path, plain: Worker) -> None:
    compiled = make_worker(model_dir, enforce_eager=False, compile_sizes=("64x64",))

    assert distance(draw(compiled), draw(plain)) <= 1
