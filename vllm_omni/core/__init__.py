"""What runs inside vLLM's engine core process of an autoregressive replica."""
