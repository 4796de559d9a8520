"""/v1/completions: vLLM's serving class over the text stage, with our error answers."""
