"""Ask an omni model about images, recordings and videos; keep its answer as text and speech.

python examples/offline_inference/omni_chat.py "What is this?" photo.jpg --model MODEL
"""

import argparse
import base64
import mimetypes
from pathlib import Path

import soundfile

from vllm_omni import Omni


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
    parser.add_argument("--model", required=True)
    parser.add_argument("--text-only", action="store_true")
    parser.add_argument("--hear-videos", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("answer.wav"))
    parser.add_argument("--max-tokens", type=int, default=200)
    args = parser.parse_args()

    from vllm import SamplingParams

    content = [*map(part, args.files), {"type": "text", "text": args.question}]
    prompt = {
        "messages": [{"role": "user", "content": content}],
        "mm_processor_kwargs": {"use_audio_in_video": args.hear_videos},
    }
    wanted = ["text"] if args.text_only else ["text", "audio"]
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    with Omni(model=args.model) as omni:
        (result,) = omni.generate(prompt, params, output_modalities=wanted)

    if result.error is not None:
        raise result.error
    print(result.text)
    if result.audio is not None:
        soundfile.write(args.out, result.audio.samples(), result.audio.sample_rate_hz)
        print(f"{args.out}: {result.audio.duration_s:.1f} s")


if __name__ == "__main__":  # replicas are spawned: they import this file
    main()
