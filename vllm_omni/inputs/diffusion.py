"""Params of a diffusion stage, as a user gives them per request."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class OmniDiffusionSamplingParams:
    """What one request asks of a diffusion stage. None: the model's own default."""

    seed: int | None = None
    num_inference_steps: int | None = None
    height: int | None = None
    """Pixels."""
    width: int | None = None
    """Pixels."""
    num_frames: int | None = None
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    negative_prompt: str | None = None
    num_outputs_per_prompt: int = 1
    quality: str | None = None
    """None, `lossless` or `high`."""
    extra_args: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.quality not in (None, "lossless", "high"):
            raise ValueError(f"quality must be None, 'lossless' or 'high', got {self.quality!r}")
        for name in ("num_inference_steps", "height", "width", "num_frames"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.num_outputs_per_prompt < 1:
            raise ValueError(
                f"num_outputs_per_prompt must be at least 1, got {self.num_outputs_per_prompt}"
            )
