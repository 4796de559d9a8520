"""Have a server make a video from a text, and fetch it when it is made.

vllm serve Wan-AI/Wan2.1-T2V-1.3B-Diffusers --omni --port 8091
python examples/online_serving/text_to_video.py "Waves at night" --seconds 4
"""

import argparse
from pathlib import Path

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--base-url", default="http://localhost:8091/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--size", default="auto")
    parser.add_argument("--seconds", help="length; the model's own unless given")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("video.mp4"))
    args = parser.parse_args()

    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    more = {"seed": args.seed} | ({"num_inference_steps": args.steps} if args.steps else {})
    given = {"seconds": args.seconds} if args.seconds else {}
    video = client.videos.create_and_poll(
        model=client.models.list().data[0].id,
        prompt=args.prompt,
        size=args.size,
        extra_body=more,
        **given,
    )
    if video.status == "failed":
        raise SystemExit(f"{video.id}: {video.error.message}")
    client.videos.download_content(video.id).write_to_file(args.out)
    print(f"{args.out}: {video.size}, {video.seconds} s")


if __name__ == "__main__":
    main()
