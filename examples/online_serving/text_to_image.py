"""Have a server make pictures from a text; with `--stream` it tells how far it is.

vllm serve Qwen/Qwen-Image --omni --port 8091
python examples/online_serving/text_to_image.py "A fox in the snow" --size 512x512
"""

import argparse
import base64
from pathlib import Path

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--base-url", default="http://localhost:8091/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--size", default="auto")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-n", type=int, default=1)
    parser.add_argument("--format", default="png", choices=["png", "jpeg", "webp"])
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("."))
    args = parser.parse_args()

    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    more = {"seed": args.seed} | ({"num_inference_steps": args.steps} if args.steps else {})
    answer = client.images.generate(
        model=client.models.list().data[0].id,
        prompt=args.prompt,
        n=args.n,
        size=args.size,
        output_format=args.format,
        stream=args.stream,
        extra_body=more,
    )
    args.out.mkdir(parents=True, exist_ok=True)

    def save(number: int, data: str) -> None:
        path = args.out / f"image_{number}.{args.format}"
        path.write_bytes(base64.b64decode(data))
        print(path)

    if not args.stream:
        for i, image in enumerate(answer.data):
            save(i, image.b64_json)
        return
    for event in answer:
        if event.type == "image_generation.progress":
            print(f"picture {event.image_index}: step {event.step} of {event.num_steps}")
        elif event.type == "image_generation.completed":
            save(event.image_index, event.b64_json)


if __name__ == "__main__":
    main()
