"""What is attached to a pipeline's modules from outside, and set before each forward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from vllm_omni.diffusion.models.interface import DenoiseState, PipelineComponents
from vllm_omni.diffusion.request import DiffusionRequest


class Attachments:
    """Accelerations of one pipeline. Off, they change nothing."""

    def __init__(self, components: PipelineComponents) -> None:
        self._components = components

    def before_step(self, states: Sequence[DenoiseState]) -> None:
        """Set what the members of a forward ask for; they all ask for the same."""
        self.before_run(states[0].request)

    def before_run(self, request: DiffusionRequest) -> None:
        """Set what a request asks for."""

    @contextlib.contextmanager
    def tiling(self, *, enabled: bool) -> Iterator[None]:
        """Decode in tiles meanwhile, where the VAE can."""
        vae = self._components.vae
        if not enabled or vae is None or getattr(vae, "use_tiling", True):
            yield
            return
        vae.enable_tiling()
        try:
            yield
        finally:
            vae.disable_tiling()
