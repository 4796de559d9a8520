"""Have a server speak a text; with `--format pcm` the samples are written as they come.

vllm serve .demo/smol_voice --omni --port 8091
python examples/online_serving/text_to_speech.py "Good morning!" --out morning.wav
"""

import argparse
import time
from pathlib import Path

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text")
    parser.add_argument("--base-url", default="http://localhost:8091/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--voice", default="default")
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--format", default="wav", help="wav, pcm, mp3, flac, opus or aac")
    parser.add_argument("--out", type=Path, default=Path("speech.wav"))
    args = parser.parse_args()

    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    started_s = time.monotonic()
    first_s = None
    with (
        client.audio.speech.with_streaming_response.create(
            model=client.models.list().data[0].id,
            input=args.text,
            voice=args.voice,
            speed=args.speed,
            response_format=args.format,
        ) as response,
        args.out.open("wb") as file,
    ):
        for data in response.iter_bytes():
            first_s = first_s or time.monotonic() - started_s
            file.write(data)
    print(f"{args.out}: first bytes after {first_s or 0:.2f} s")


if __name__ == "__main__":
    main()
