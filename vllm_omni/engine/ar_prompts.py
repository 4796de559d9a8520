"""From an `OmniPrompt` to vLLM's engine requests: rendered, tokenized, validated.

Each event loop has its own `PromptProcessor` with its own tokenizer: a fast tokenizer that two
threads use at once raises "Already borrowed". Slow work runs in the renderer's threads.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vllm.config import VllmConfig
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.renderers import renderer_from_config
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.renderers.params import ChatParams
from vllm.sampling_params import SamplingParams
from vllm.tasks import GENERATION_TASKS
from vllm.utils.mistral import is_mistral_tokenizer
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor

from vllm_omni.core.conditioning import REPETITION_KEY, SOURCES_KEY
from vllm_omni.core.request_deadlines import REMAINING_KEY
from vllm_omni.core.token_streams import TARGETS_KEY
from vllm_omni.engine.ar_checks import refuse_fatal
from vllm_omni.engine.ar_speech import SETTINGS_KEY, SpeechPrompter, check_audio
from vllm_omni.engine.grammar_bounds import check_grammar
from vllm_omni.engine.messages import StreamSource
from vllm_omni.errors import BadRequestError, ConfigError
from vllm_omni.inputs.prompt import OmniPrompt
from vllm_omni.vllm_compat.processor_caches import forget_processors

MESSAGES_KEY: Final = "messages"
"""Key of `OmniPrompt.extra`: a conversation that the chat template is to render."""

CHAT_KWARGS_KEY: Final = "chat_template_kwargs"
SPECIAL_TOKENS_KEY: Final = "add_special_tokens"
"""Key of `OmniPrompt.extra`: False for a text that a chat template wrote, which has its own."""

_OUR_KEYS: Final = (MESSAGES_KEY, CHAT_KWARGS_KEY, SPECIAL_TOKENS_KEY, SETTINGS_KEY)
_VLLM_KEYS: Final = (
    "cache_salt",
    "decoder_prompt",
    "encoder_prompt",
    "mm_processor_kwargs",
    "multi_modal_data",
    "multi_modal_uuids",
    "prompt_embeds",
    "prompt_is_token_ids",
)
"""Fields of vLLM's prompt dictionaries that may stand beside the words."""

_ONE_TOKEN: Final[Mapping[str, Any]] = {"type": "token", "prompt_token_ids": [0]}
"""What vLLM's renderer makes of a prompt of one token."""

_RENDERER_RANKS: Final = itertools.count(1)

_PASSED_OPTIONS: Final = (
    "arrival_time",
    "lora_request",
    "tokenization_kwargs",
    "trace_headers",
    "priority",
    "session_id",
    "kv_hints",
)
_REQUEST_OPTIONS: Final = ("reasoning_ended", "reasoning_parser_kwargs")
_OTHER_OPTIONS: Final = ("prompt_text", "data_parallel_rank")


@dataclass(slots=True)
class PreparedPrompt:
    """One prompt, ready for the core. Several requests when its audio is longer than one clip."""

    requests: list[EngineCoreRequest]
    text: str | None = None
    """The prompt's words, for `RequestOutput.prompt`."""
    separator: str = ""
    """Joins the texts of the requests."""


class PromptProcessor:
    """Turns prompts of one autoregressive stage into engine requests, for one event loop."""

    def __init__(self, stage: str, vllm_config: VllmConfig) -> None:
        """Load tokenizer and processor; blocks. ConfigError when they do not fit the model."""
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        try:
            self.renderer = renderer_from_config(vllm_config)
            # The renderer's is a copy already; the object below it is shared with every other.
            self.renderer.tokenizer = copy.deepcopy(self.renderer.tokenizer)
            # Part of the ids that media get without a hash. Two renderers of the same rank would
            # give different media one id, and the core would take one's encoding for the other's.
            self.renderer.api_process_rank = next(_RENDERER_RANKS)
            self.input_processor = InputProcessor(vllm_config, self.renderer)
            if (processor := self.renderer.mm_processor) is not None:
                # vLLM's default is torchaudio, whose builds ask for CUDA; soxr is what we ship.
                processor.info.data_parser.audio_resampler.method = "soxr"
        except Exception as error:
            # Readers of tokenizers and processors raise what they like for a damaged file.
            text = " ".join(str(error).split())
            if not isinstance(error, ValueError | OSError):
                text = f"its tokenizer or processor cannot be loaded: {type(error).__name__} {text}"
            raise ConfigError(f"stage {stage!r}: {text}") from error
        if self.model_config.skip_tokenizer_init:
            # It writes no text: the checkpoint's end tokens are another stage's, and outside of
            # its vocabulary an index into logits that ends the core.
            self.input_processor.generation_config_fields = {}
        self._speech = SpeechPrompter.of(self.model_config)

    @property
    def reads_speech(self) -> bool:
        """The model takes audio and nothing else."""
        return self._speech is not None

    def shutdown(self) -> None:
        """Stop the renderer's threads, and let go of what vLLM keeps for it. Repeatable."""
        self.renderer.shutdown()
        if self.renderer.mm_processor is not None:
            forget_processors()

    async def process(
        self,
        request_id: str,
        prompt: OmniPrompt,
        params: SamplingParams,
        options: Mapping[str, Any],
    ) -> list[PreparedPrompt]:
        """Engine requests for a prompt: one entry, or one for each audio item of a speech model.

        Raises:
            BadRequestError: names the field that cannot be served.
        """
        if not isinstance(params, SamplingParams):
            raise BadRequestError(
                f"sampling params of a text stage are SamplingParams, not {type(params).__name__}",
                field="sampling_params",
            )
        if params.structured_outputs is not None:
            check_grammar(params.structured_outputs)
        _refuse_own_keys(params)
        unknown = set(options) - {*_PASSED_OPTIONS, *_REQUEST_OPTIONS, *_OTHER_OPTIONS}
        if unknown:
            raise BadRequestError(f"unknown option {min(unknown)!r}", field=min(unknown))
        field = "prompt"
        try:
            # What vLLM's own transcription serving rendered for this model is taken as it is.
            if self._speech is not None and (prompt.audio or prompt.engine_input is None):
                return await self._process_speech(request_id, prompt, params, options)
            engine_input = await self._render(prompt, options)
            # What vLLM names no field for is, past the rendering, a grammar if there is one.
            field = "prompt" if params.structured_outputs is None else "structured_outputs"
            request = self._request(request_id, engine_input, params, options)
        except (VLLMClientError, ValueError, TypeError) as error:
            raise as_bad_request(error, field) from error
        text = options.get("prompt_text") or prompt.text or engine_input.get("prompt")
        return [PreparedPrompt([request], text)]

    def parked(
        self, request_id: str, params: object, sources: Sequence[StreamSource]
    ) -> PreparedPrompt:
        """A request whose prompt a stream will make in the core. It holds one token until then.

        Raises:
            BadRequestError: its params cannot be served.
        """
        if not isinstance(params, SamplingParams):
            raise BadRequestError("a talker's params are SamplingParams", field="sampling_params")
        _refuse_own_keys(params)
        own = params.clone()
        own.skip_clone = True  # nobody else has it: vLLM need not copy it again
        own.extra_args = {
            **(own.extra_args or {}),
            SOURCES_KEY: [[s.stream, s.stage, s.bridge, s.context] for s in sources],
        }
        eos_token_ids = self.model_config.hf_text_config.eos_token_id
        own.update_from_generation_config({"eos_token_id": eos_token_ids})
        if own.ignore_eos and own.max_tokens is not None:
            own.min_tokens = own.max_tokens  # an end is no code: it may not be sampled either
        own.detokenize = False
        if own.repetition_penalty != 1.0:
            own.extra_args[REPETITION_KEY] = own.repetition_penalty
            own.repetition_penalty = 1.0
        try:
            request = self._request(request_id, _ONE_TOKEN, own, {})
        except (VLLMClientError, ValueError, TypeError) as error:
            raise as_bad_request(error, "sampling_params") from error
        return PreparedPrompt([request])

    def _hears(self, prompt: OmniPrompt) -> bool:
        """The prompt is audio for a speech model, whatever words stand beside it for others."""
        return self.reads_speech and (bool(prompt.audio) or prompt.engine_input is None)

    async def _render(self, prompt: OmniPrompt, options: Mapping[str, Any]) -> dict[str, Any]:
        """vLLM's rendered input of a prompt in any of its forms."""
        if prompt.engine_input is not None:
            return dict(prompt.engine_input)
        if (messages := prompt.extra.get(MESSAGES_KEY)) is not None:
            return await self.render_chat(messages, prompt.extra.get(CHAT_KWARGS_KEY))
        fields = _vllm_fields(prompt)
        if prompt.token_ids is not None:
            fields["prompt_token_ids"] = list(prompt.token_ids)
        elif prompt.text is not None:
            fields["prompt"] = prompt.text
        tokenization = dict(options.get("tokenization_kwargs") or {})
        if SPECIAL_TOKENS_KEY in prompt.extra:
            tokenization[SPECIAL_TOKENS_KEY] = bool(prompt.extra[SPECIAL_TOKENS_KEY])
        tok_params = self.renderer.default_cmpl_tok_params.with_kwargs(**tokenization)
        parsed = parse_model_prompt(self.model_config, fields)
        (rendered,) = await self.renderer.render_cmpl_async([parsed], tok_params)
        return dict(rendered)

    async def render_chat(
        self, messages: object, template_kwargs: object = None, processor_kwargs: object = None
    ) -> dict[str, Any]:
        """A conversation through the model's chat template, as vLLM's rendered input.

        Raises:
            BadRequestError: not a conversation, or the template refuses it.
        """
        if not isinstance(messages, list) or not messages:
            raise BadRequestError(
                "messages must be a list with at least one entry", field="messages"
            )
        kwargs = dict(template_kwargs) if isinstance(template_kwargs, Mapping) else {}
        kwargs.setdefault("add_generation_prompt", True)
        # Rendered to text, which goes on beside the tokens; Mistral's template cannot.
        kwargs.setdefault("tokenize", is_mistral_tokenizer(self.renderer.tokenizer))
        options = dict(processor_kwargs) if isinstance(processor_kwargs, Mapping) else {}
        try:
            _, (rendered,) = await self.renderer.render_chat_async(
                [messages],
                ChatParams(chat_template_kwargs=kwargs, mm_processor_kwargs=options),
                prompt_extras={"mm_processor_kwargs": options} if options else None,
            )
        except (VLLMClientError, ValueError, TypeError, KeyError) as error:
            raise as_bad_request(error, "messages") from error
        return dict(rendered)

    async def _process_speech(
        self,
        request_id: str,
        prompt: OmniPrompt,
        params: SamplingParams,
        options: Mapping[str, Any],
    ) -> list[PreparedPrompt]:
        assert self._speech is not None, "only called for speech models"
        if not prompt.audio:
            raise BadRequestError("this stage needs audio", field="audio")
        settings: dict[str, object] = {}
        for source in (params.extra_args or {}, prompt.extra):
            if isinstance(given := source.get(SETTINGS_KEY), Mapping):
                settings.update(given)
        prepared = []
        for item, audio in enumerate(prompt.audio):
            speech = await asyncio.to_thread(self._speech.prompts, audio, settings)
            parsed = [parse_model_prompt(self.model_config, p) for p in speech.prompts]
            inputs = await self.renderer.render_cmpl_async(parsed)
            requests = [
                self._request(f"{request_id}/{item}.{clip}", engine_input, params, options)
                for clip, engine_input in enumerate(inputs)
            ]
            prepared.append(PreparedPrompt(requests, None, speech.separator))
        return prepared

    def _request(
        self,
        request_id: str,
        engine_input: Mapping[str, Any],
        params: SamplingParams,
        options: Mapping[str, Any],
    ) -> EngineCoreRequest:
        passed = {name: options[name] for name in _PASSED_OPTIONS if name in options}
        request = self.input_processor.process_inputs(
            request_id, dict(engine_input), params, GENERATION_TASKS, **passed
        )
        for name in _REQUEST_OPTIONS:
            if options.get(name) is not None:
                setattr(request, name, options[name])
        refuse_fatal(request, self.vllm_config)
        return request


def _refuse_own_keys(params: SamplingParams) -> None:
    """Refuse what only this package puts into a request's params."""
    for key in (TARGETS_KEY, SOURCES_KEY, REMAINING_KEY, REPETITION_KEY):
        if key in (params.extra_args or {}):
            raise BadRequestError(f"{key} is not a client's to set", field="extra_args")


def _vllm_fields(prompt: OmniPrompt) -> dict[str, Any]:
    """The prompt's fields beside its words, as vLLM's own prompt has them."""
    unknown = set(prompt.extra) - {*_VLLM_KEYS, *_OUR_KEYS}
    if unknown:
        raise BadRequestError(f"a prompt has no field {min(unknown)!r}", field=min(unknown))
    fields: dict[str, Any] = {key: prompt.extra[key] for key in _VLLM_KEYS if key in prompt.extra}
    if prompt.audio:  # for a model that reads it beside its text
        items = [(check_audio(item), item.sample_rate_hz) for item in prompt.audio]
        fields["multi_modal_data"] = {**fields.get("multi_modal_data", {}), "audio": items}
    return fields


def as_bad_request(error: Exception, field: str = "prompt") -> BadRequestError:
    """A refusal of vLLM's as ours; the field is the one that vLLM names, if it does."""
    if isinstance(error, BadRequestError):
        return error
    message: object = error
    if isinstance(error, VLLMValidationError):
        message, field = error.args[0], error.parameter or field
    return BadRequestError(" ".join(str(message).split()), field=field)
