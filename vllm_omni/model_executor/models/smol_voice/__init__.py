"""A small speaking assistant for any CPU: Whisper tiny, SmolLM2-135M and a Piper voice."""
