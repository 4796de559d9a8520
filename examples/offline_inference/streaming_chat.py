"""Read an answer while it is made: text as it is written, sound as it is spoken (AsyncOmni).

python examples/offline_inference/streaming_chat.py --model .demo/smol_voice "Why is the sky blue?"
"""

import argparse
import asyncio
import wave
from contextlib import aclosing
from pathlib import Path

from vllm_omni import AsyncOmni


async def ask(omni: AsyncOmni, question: str, path: Path, max_tokens: int) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    prompt = {"messages": [{"role": "user", "content": question}]}
    params = SamplingParams(max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA)
    sound = bytearray()
    # Leaving the loop early, or an exception in it, ends the request in every stage.
    async with aclosing(omni.generate(prompt, params)) as outputs:
        async for output in outputs:
            print(output.text, end="", flush=True)
            if output.audio is not None:  # play it here
                sound += output.audio.pcm
                rate_hz = output.audio.sample_rate_hz
    print()
    if sound:
        with wave.open(str(path), "wb") as file:
            file.setparams((1, 2, rate_hz, 0, "NONE", ""))
            file.writeframes(sound)
        print(path)
    for stage, timings in output.timings.items():
        print(f"   {stage}: first output after {timings.first_output_s or 0:.2f} s")


async def run(args: argparse.Namespace) -> None:
    async with await AsyncOmni.create(model=args.model) as omni:
        await ask(omni, args.question, args.out, args.max_tokens)


if __name__ == "__main__":  # replicas are spawned: they import this file
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question")
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, default=Path("answer.wav"))
    parser.add_argument("--max-tokens", type=int, default=100)
    asyncio.run(run(parser.parse_args()))
