"""/v1/audio/transcriptions: vLLM's speech-to-text serving over the recognising stage."""
