"""Have a server change a picture as a text says.

vllm serve Qwen/Qwen-Image-Edit --omni --port 8091
python examples/online_serving/image_to_image.py "Make it night" --image house.png
"""

import argparse
import base64
from pathlib import Path

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--image", type=Path, nargs="+", required=True)
    parser.add_argument("--mask", type=Path, help="transparent where it is painted anew")
    parser.add_argument("--base-url", default="http://localhost:8091/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("edited.png"))
    args = parser.parse_args()

    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    more = {"seed": args.seed} | ({"num_inference_steps": args.steps} if args.steps else {})
    given = {"mask": args.mask} if args.mask is not None else {}
    answer = client.images.edit(
        model=client.models.list().data[0].id,
        prompt=args.prompt,
        image=args.image,
        extra_body=more,
        **given,
    )
    args.out.write_bytes(base64.b64decode(answer.data[0].b64_json))
    print(f"{args.out}: {answer.size}")


if __name__ == "__main__":
    main()
