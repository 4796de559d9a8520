"""/v1/chat/completions: vLLM's chat serving for the text, ours for audio in and out."""
