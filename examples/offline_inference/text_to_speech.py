"""Speak a few texts; each becomes a WAV file.

python examples/offline_inference/text_to_speech.py --model .demo/smol_voice "Good morning!"
"""

import argparse
from pathlib import Path

import soundfile

from vllm_omni import Omni
from vllm_omni.config.pipeline import Task
from vllm_omni.inputs.speech import SpeechParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--model", required=True)
    parser.add_argument("--voice", default="default")
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=Path("."))
    args = parser.parse_args()

    speech = SpeechParams(voice=args.voice, speed=args.speed)
    with Omni(model=args.model) as omni:
        results = omni.generate(args.texts, task=Task.SPEECH, speech=speech)

    args.out.mkdir(parents=True, exist_ok=True)
    for i, (text, result) in enumerate(zip(args.texts, results, strict=True)):
        if result.error is not None:
            raise result.error
        if result.audio is None:
            print(f"nothing to say in {text!r}")
            continue
        path = args.out / f"speech_{i}.wav"
        soundfile.write(path, result.audio.samples(), result.audio.sample_rate_hz)
        print(f"{path}: {result.audio.duration_s:.1f} s for {text!r}")


if __name__ == "__main__":  # replicas are spawned: they import this file
    main()
