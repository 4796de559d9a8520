"""What a request gives back. Imports no torch: text outputs are vLLM's objects, passed through."""

from vllm_omni.outputs.media import AudioChunk, Frames, StepProgress
from vllm_omni.outputs.request_output import OmniRequestOutput, StageTimings

__all__ = ["AudioChunk", "Frames", "OmniRequestOutput", "StageTimings", "StepProgress"]
