"""What a request asks for: prompts, media, params. Validated before anything expensive runs."""

from vllm_omni.inputs.prompt import AudioInput, ImageInput, OmniPrompt

__all__ = ["AudioInput", "ImageInput", "OmniPrompt"]
