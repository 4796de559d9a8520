"""How the ranks of one replica take a denoise step together."""
