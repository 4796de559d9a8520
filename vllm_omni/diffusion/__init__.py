"""The diffusion engine: images and video, batched by the denoise step."""
