"""Ask questions and keep the answers as text and speech.

python examples/offline_inference/chat.py --model .demo/smol_voice "What is the capital of France?"
"""

import argparse
from pathlib import Path

import soundfile

from vllm_omni import Omni


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("questions", nargs="+")
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--max-tokens", type=int, default=100)
    args = parser.parse_args()

    from vllm import SamplingParams

    prompts = [{"messages": [{"role": "user", "content": q}]} for q in args.questions]
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    with Omni(model=args.model) as omni:
        results = omni.generate(prompts, params, output_modalities=["text", "audio"])

    args.out.mkdir(parents=True, exist_ok=True)
    for i, (question, result) in enumerate(zip(args.questions, results, strict=True)):
        if result.error is not None:
            raise result.error
        print(f"Q: {question}\nA: {result.text.strip()}")
        if result.audio is not None:  # an answer without words is silent
            path = args.out / f"answer_{i}.wav"
            soundfile.write(path, result.audio.samples(), result.audio.sample_rate_hz)
            print(f"   {path}: {result.audio.duration_s:.1f} s")


if __name__ == "__main__":  # replicas are spawned: they import this file
    main()
