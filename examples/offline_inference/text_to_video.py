"""Make a video from a text.

python examples/offline_inference/text_to_video.py "Waves at night" \
    --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers
"""

import argparse
from pathlib import Path

from vllm_omni import Omni, OmniDiffusionSamplingParams
from vllm_omni.outputs.video_file import write_mp4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--model", required=True)
    parser.add_argument("--negative-prompt")
    parser.add_argument("--height", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--num-frames", type=int)
    parser.add_argument("--fps", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--guidance-scale", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("video.mp4"))
    args = parser.parse_args()

    params = OmniDiffusionSamplingParams(
        negative_prompt=args.negative_prompt,
        height=args.height,
        width=args.width,
        num_frames=args.num_frames,
        fps=args.fps,
        num_inference_steps=args.steps,
        guidance_scale=args.guidance_scale,
        seed=args.seed,
    )
    with Omni(model=args.model) as omni:
        (result,) = omni.generate(args.prompt, params)
    if result.error is not None:
        raise result.error

    video = result.video
    write_mp4(video, args.out)
    print(f"{args.out}: {video.num_frames} frames, {video.duration_s:.2f} s")


if __name__ == "__main__":  # replicas are spawned: they import this file
    main()
