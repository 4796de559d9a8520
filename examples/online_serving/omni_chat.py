"""Ask a served omni model about images, recordings and videos; hear the answer as it comes.

python examples/online_serving/omni_chat.py "What is this?" photo.jpg --voice ethan
"""

import argparse
import base64
import mimetypes
import time
import wave
from pathlib import Path

from openai import OpenAI

RATE_HZ = 24_000


def part(path: Path) -> dict[str, object]:
    """One file as a content part, its kind by its name."""
    mime = mimetypes.guess_type(path)[0] or "application/octet-stream"
    kind = f"{mime.partition('/')[0]}_url"  # image_url, audio_url or video_url
    data = base64.b64encode(path.read_bytes()).decode()
    return {"type": kind, kind: {"url": f"data:{mime};base64,{data}"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question")
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--voice", default="default")
    parser.add_argument("--text-only", action="store_true")
    parser.add_argument("--hear-videos", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("answer.wav"))
    parser.add_argument("--max-tokens", type=int, default=200)
    args = parser.parse_args()

    client = OpenAI(base_url=args.base_url, api_key="none")
    content = [*map(part, args.files), {"type": "text", "text": args.question}]
    options: dict[str, object] = {}
    if not args.text_only:
        options["modalities"] = ["text", "audio"]
        options["audio"] = {"voice": args.voice, "format": "pcm16"}
    if args.hear_videos:
        options["extra_body"] = {"mm_processor_kwargs": {"use_audio_in_video": True}}
    started_s, sound = time.monotonic(), bytearray()
    for event in client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": content}],
        max_tokens=args.max_tokens,
        stream=True,
        **options,
    ):
        for choice in event.choices:
            print(choice.delta.content or "", end="", flush=True)
            heard = getattr(choice.delta, "audio", None)
            if heard is not None and heard.data:
                if not sound:
                    print(f"[first sound after {time.monotonic() - started_s:.2f} s]", end="")
                sound += base64.b64decode(heard.data)
    print()
    if sound:
        with wave.open(str(args.out), "wb") as file:
            file.setparams((1, 2, RATE_HZ, 0, "NONE", ""))
            file.writeframes(sound)
        print(f"{args.out}: {len(sound) / 2 / RATE_HZ:.1f} s")


if __name__ == "__main__":
    main()
