#!/usr/bin/env bash
# Prints what to try once `make serve` is up.
set -euo pipefail
url=http://127.0.0.1:${PORT:-8091}/v1
cat <<TEXT
The server takes about half a minute to start; it is ready when it says so. Then, from another terminal:

  curl $url/chat/completions -H 'Content-Type: application/json' -d '{
    "messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 60}'

  curl $url/audio/speech -H 'Content-Type: application/json' --output hello.wav -d '{
    "input": "Hello from a small model.", "voice": "default", "response_format": "wav"}'

or with the openai package (.venv/bin/python):

  from base64 import b64decode
  from openai import OpenAI
  client = OpenAI(base_url="$url", api_key="none")
  answer = client.chat.completions.create(
      model=client.models.list().data[0].id, modalities=["text", "audio"],
      audio={"voice": "default", "format": "wav"}, max_tokens=60,
      messages=[{"role": "user", "content": "Tell me about the sea."}])
  open("answer.wav", "wb").write(b64decode(answer.choices[0].message.audio.data))

Ctrl-C stops it.

TEXT
