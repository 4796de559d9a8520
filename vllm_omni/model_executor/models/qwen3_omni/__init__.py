"""Qwen3-Omni: a mixture-of-experts thinker that hears and sees, a talker, a causal vocoder."""
