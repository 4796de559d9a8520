"""GLM-Image: an autoregressive model writes image tokens, a denoiser draws them."""
