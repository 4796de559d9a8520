"""Text from sound: transcribe recordings, or answer what is asked in them (`--answer`).

python examples/offline_inference/x_to_text.py --model .demo/smol_voice question.wav --answer
"""

import argparse
from pathlib import Path

import numpy as np
import soundfile

from vllm_omni import Omni
from vllm_omni.config.pipeline import Task


def read(path: Path) -> tuple[np.ndarray, int]:
    samples, rate_hz = soundfile.read(path, dtype="float32")
    return samples, rate_hz


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", nargs="+", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--answer", action="store_true")
    args = parser.parse_args()

    audio = [read(path) for path in args.recordings]
    with Omni(model=args.model) as omni:
        if args.answer:
            contents = [[{"type": "audio", "audio": item}] for item in audio]
            prompts = [{"messages": [{"role": "user", "content": c}]} for c in contents]
            results = omni.generate(prompts, output_modalities=["text"])
        else:
            prompts = [{"multi_modal_data": {"audio": item}} for item in audio]
            results = omni.generate(prompts, task=Task.TRANSCRIPTION)

    for path, result in zip(args.recordings, results, strict=True):
        if result.error is not None:
            raise result.error
        print(f"{path}: {result.text.strip()}")


if __name__ == "__main__":  # replicas are spawned: they import this file
    main()
