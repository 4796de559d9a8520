"""What runs below vLLM's engine core: executors and workers of autoregressive stages."""
