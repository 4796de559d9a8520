"""Make pictures from texts; each becomes a PNG file.

python examples/offline_inference/text_to_image.py "A fox in the snow" --model Qwen/Qwen-Image
"""

import argparse
from pathlib import Path

import numpy as np
from diffusers.utils import numpy_to_pil

from vllm_omni import Omni, OmniDiffusionSamplingParams


def _normalize_images_for_save(images: list) -> list:
    """NumPy batches (floats in [0, 1]) as PIL images, in order; anything else as it is."""
    normalized = []
    for image in images:
        normalized += numpy_to_pil(image) if isinstance(image, np.ndarray) else [image]
    return normalized


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--model", required=True)
    parser.add_argument("--negative-prompt")
    parser.add_argument("--height", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--guidance-scale", type=float)
    parser.add_argument("--true-cfg-scale", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-images", type=int, default=1, help="of each prompt")
    parser.add_argument("--out", type=Path, default=Path("."))
    args = parser.parse_args()

    params = OmniDiffusionSamplingParams(
        negative_prompt=args.negative_prompt,
        height=args.height,
        width=args.width,
        num_inference_steps=args.steps,
        guidance_scale=args.guidance_scale,
        true_cfg_scale=args.true_cfg_scale,
        seed=args.seed,
        num_outputs_per_prompt=args.num_images,
    )
    with Omni(model=args.model) as omni:
        outputs = omni.generate(args.prompts, params)

    args.out.mkdir(parents=True, exist_ok=True)
    for i, request_output in enumerate(outputs):
        if request_output.error is not None:
            raise request_output.error
        images = request_output.images
        if not images:
            raise ValueError("No images found in request_output")
        for j, image in enumerate(_normalize_images_for_save(images)):
            path = args.out / f"image_{i}_{j}.png"
            image.save(path)
            print(f"{path}: {image.width}x{image.height}")


if __name__ == "__main__":  # replicas are spawned: they import this file
    main()
