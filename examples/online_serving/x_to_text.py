"""Have a server transcribe a recording.

vllm serve .demo/smol_voice --omni --port 8091
python examples/online_serving/x_to_text.py recording.wav
"""

import argparse
from pathlib import Path

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--base-url", default="http://localhost:8091/v1")
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args()

    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    with args.recording.open("rb") as file:
        result = client.audio.transcriptions.create(
            model=client.models.list().data[0].id, file=file
        )
    print(result.text.strip())


if __name__ == "__main__":
    main()
