"""The accelerations of one pipeline: attached when it is loaded, set before each forward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

from vllm_omni.config.diffusion_options import DiffusionEngineArgs
from vllm_omni.diffusion.accelerations.attention import set_attention_backend
from vllm_omni.diffusion.accelerations.compiling import compile_blocks
from vllm_omni.diffusion.accelerations.lora import LoraSwitch
from vllm_omni.diffusion.accelerations.offload import offload_groups
from vllm_omni.diffusion.accelerations.step_cache import StepCache
from vllm_omni.diffusion.accelerations.vae import VaeMode
from vllm_omni.diffusion.models.interface import Capabilities, DenoiseState, ExecutionMode
from vllm_omni.diffusion.models.interface import PipelineComponents as Components
from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.errors import ConfigError


class Attachments:
    """Off, they change nothing."""

    def __init__(
        self,
        components: Components,
        capabilities: Capabilities,
        args: DiffusionEngineArgs,
        device: str,
    ) -> None:
        """Attach what the options ask for, in the order that each needs of the others.

        Raises:
            ConfigError: the model or the device cannot do it.
        """
        check_offload(args, device)
        set_attention_backend(components.denoisers, args.attention_backend, device)
        self._vae = VaeMode(components.vae, args.vae_tiling, args.vae_slicing)
        self._lora = LoraSwitch(components, args.lora_modules)
        self._step_cache: StepCache | None = None
        if args.step_cache != "none":
            if capabilities.mode is not ExecutionMode.STEP:
                raise ConfigError("step_cache: the model does not run by the step here")
            self._step_cache = StepCache(components.denoisers, args.step_cache_threshold)
        if args.offload == "group":
            offload_groups(components, device, use_stream=True)
        self.compiles = compile_blocks(
            components.denoisers,
            enforce_eager=args.enforce_eager,
            by_default=device != "cpu" and args.offload == "none",
        )
        """The denoisers' blocks are compiled when they first run."""

    @property
    def max_batch_size(self) -> int | None:
        """Most requests per forward; None: no bound from here."""
        return 1 if self._step_cache is not None else None

    @property
    def num_remembered(self) -> int:
        """Requests of which the step cache remembers something."""
        return len(self._step_cache) if self._step_cache is not None else 0

    def before_step(self, states: Sequence[DenoiseState]) -> None:
        """Set what the members of a forward ask for; they all ask for the same."""
        request = states[0].request
        self.before_run(request)
        if self._step_cache is not None:
            self._step_cache.begin_step(request.request_id, request.quality)

    def before_run(self, request: DiffusionRequest) -> None:
        """Set what a request asks for."""
        self._lora.use(request.lora, request.lora_scale)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Nothing of these requests is needed any more."""
        if self._step_cache is not None:
            self._step_cache.forget(request_ids)

    def tiling(self, *, enabled: bool) -> contextlib.AbstractContextManager[None]:
        """Decode in tiles meanwhile, where that is left open and the VAE can."""
        return self._vae.tiled() if enabled else contextlib.nullcontext()


def check_offload(args: DiffusionEngineArgs, device: str) -> None:
    """Raise ConfigError where there is nothing to offload from."""
    if args.offload != "none" and device == "cpu":
        raise ConfigError(f"offload: {args.offload} needs a GPU; the weights are in host memory")
