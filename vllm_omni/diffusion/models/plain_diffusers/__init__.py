"""Any pipeline class of diffusers that has no family of its own: one request after another."""
