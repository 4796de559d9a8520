"""/v1/audio/speech: a text spoken, streamed as it is made."""
