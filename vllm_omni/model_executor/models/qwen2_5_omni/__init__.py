"""Qwen2.5-Omni: a thinker that hears and sees, a talker, a flow-matching vocoder."""
