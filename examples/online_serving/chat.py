"""Ask a server a question, in text or by voice; read and hear the answer while it is made.

vllm serve .demo/smol_voice --omni --port 8091
python examples/online_serving/chat.py "What is the capital of France?"
python examples/online_serving/chat.py --recording question.wav
"""

import argparse
import base64
import wave
from pathlib import Path

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?")
    parser.add_argument("--recording", type=Path)
    parser.add_argument("--base-url", default="http://localhost:8091/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--rate-hz", type=int, default=22050, help="of the model's voice")
    parser.add_argument("--out", type=Path, default=Path("answer.wav"))
    args = parser.parse_args()
    if not args.question and not args.recording:
        parser.error("give a question, a recording, or both")

    content: list[dict] = []
    if args.recording:
        data = base64.b64encode(args.recording.read_bytes()).decode()
        content.append({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}})
    if args.question:
        content.append({"type": "text", "text": args.question})

    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": content}],
        modalities=["text", "audio"],
        audio={"voice": "default", "format": "pcm16"},
        max_completion_tokens=args.max_tokens,
        stream=True,
    )
    with wave.open(str(args.out), "wb") as file:
        file.setparams((1, 2, args.rate_hz, 0, "NONE", ""))
        for chunk in stream:
            for choice in chunk.choices:
                print(choice.delta.content or "", end="", flush=True)
                audio = getattr(choice.delta, "audio", None)
                if audio is not None and audio.data:
                    file.writeframes(base64.b64decode(audio.data))
    print(f"\n{args.out}")


if __name__ == "__main__":
    main()
