"""Change a picture as a text says, with an editing model.

python examples/offline_inference/image_to_image.py "Make it night" --image house.png \
    --model Qwen/Qwen-Image-Edit
"""

import argparse
from pathlib import Path

from PIL import Image

from vllm_omni import Omni, OmniDiffusionSamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--image", type=Path, nargs="+", required=True)
    parser.add_argument("--mask", type=Path, help="white where it is painted anew")
    parser.add_argument("--model", required=True)
    parser.add_argument("--negative-prompt")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--strength", type=float)
    parser.add_argument("--true-cfg-scale", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("edited.png"))
    args = parser.parse_args()

    media = {"image": [Image.open(path) for path in args.image]}
    if args.mask is not None:
        media["mask_image"] = Image.open(args.mask)
    params = OmniDiffusionSamplingParams(
        negative_prompt=args.negative_prompt,
        num_inference_steps=args.steps,
        strength=args.strength,
        true_cfg_scale=args.true_cfg_scale,
        seed=args.seed,
    )
    with Omni(model=args.model) as omni:
        (result,) = omni.generate({"prompt": args.prompt, "multi_modal_data": media}, params)
    if result.error is not None:
        raise result.error

    (image,) = result.images
    image.save(args.out)
    print(f"{args.out}: {image.width}x{image.height}")


if __name__ == "__main__":  # replicas are spawned: they import this file
    main()
