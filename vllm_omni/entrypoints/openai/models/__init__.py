"""/v1/models: vLLM's list with what the pipeline reads, writes and speaks."""
