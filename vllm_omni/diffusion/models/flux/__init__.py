"""FLUX.1: dev with distilled guidance, schnell without."""
