"""How large a grammar of structured output may be, estimated before anything compiles it.

The core compiles grammars in few threads that nothing can interrupt: one that takes minutes keeps
every other request with a grammar waiting. What compiling costs is mostly the number of bounded
characters (each is a state over the whole vocabulary), the optional properties of one object
(quadratic, cubic when their number is bounded) and runs of what may be left out; text that is
merely long costs little.
"""

from __future__ import annotations

import json
import re
from typing import Final

from vllm.sampling_params import StructuredOutputsParams

from vllm_omni.engine.grammar_runs import regex_cost, rules_cost
from vllm_omni.errors import BadRequestError

FIELD: Final = "structured_outputs"
MAX_CHARS: Final = 65_536
"""Characters of a schema, a grammar, or all choices together."""
MAX_REGEX_CHARS: Final = 4_096
MAX_CHOICES: Final = 1_000
MAX_NODES: Final = 10_000
"""Values in a schema."""
MAX_DEPTH: Final = 64
MAX_OPTIONAL: Final = 256
"""Properties of one object that may be left out."""
MAX_COUNTED: Final = 64
"""The same where a schema bounds how many of them there are."""
MAX_RUNS_COST: Final = 800
"""Of all runs of what may be left out: 28 things in one, or 800 of them apart."""
MAX_REPEATED: Final = 2_000
"""Characters or items that bounds of length let repeat, together."""
_SATURATED: Final = 200
"""From here on a single bound costs no more."""
_BOUND: Final = re.compile(r"\{(\d*)(?:(,)(\d*))?\}")


def check_grammar(wanted: StructuredOutputsParams) -> None:
    """Raise BadRequestError for a grammar that would take too long to compile."""
    if wanted.choice is not None:
        _at_most(len(wanted.choice), MAX_CHOICES, "choices")
        _at_most(sum(map(len, wanted.choice)), MAX_CHARS, "characters of choices")
    for pattern in (wanted.regex, wanted.whitespace_pattern):
        if pattern is not None:
            _at_most(len(pattern), MAX_REGEX_CHARS, "characters of a regular expression")
            _at_most(_repeated(pattern), MAX_REPEATED, "repetitions")
            _check_runs(regex_cost(pattern))
    if wanted.grammar is not None:
        _at_most(len(wanted.grammar), MAX_CHARS, "characters of a grammar")
        _at_most(_repeated(wanted.grammar), MAX_REPEATED, "repetitions")
        _check_runs(rules_cost(wanted.grammar))
    for schema in (wanted.json, wanted.structural_tag):
        if schema is not None:
            _check_schema(schema)


def _check_schema(schema: object) -> None:
    if isinstance(schema, str):
        _at_most(len(schema), MAX_CHARS, "characters of a schema")
        try:
            schema = json.loads(schema)
        except RecursionError:
            raise BadRequestError("the schema is nested too deep", field=FIELD) from None
        except ValueError:
            return  # vLLM says what is wrong with it
    num_nodes = num_repeated = num_chars = runs_cost = 0
    stack: list[tuple[object, int]] = [(schema, 1)]
    while stack:
        value, depth = stack.pop()
        num_nodes += 1
        _at_most(num_nodes, MAX_NODES, "values in a schema")
        _at_most(depth, MAX_DEPTH, "levels of a schema")
        if isinstance(value, str):
            num_chars += len(value)
        elif isinstance(value, list):
            stack += [(item, depth + 1) for item in value]
        elif isinstance(value, dict):
            num_chars += sum(len(name) for name in value if isinstance(name, str))
            num_repeated += _repeated_by(value)
            runs_cost += _runs_cost_by(value)
            _check_optional(value)
            stack += [(item, depth + 1) for item in value.values()]
        _at_most(num_chars, MAX_CHARS, "characters of a schema")
        _at_most(num_repeated, MAX_REPEATED, "repetitions")
        _check_runs(runs_cost)


def _repeated_by(schema: dict[str, object]) -> int:
    """What the bounds of one schema let repeat."""
    longest = schema.get("maxLength", schema.get("minLength"))
    num = min(longest, _SATURATED) if isinstance(longest, int) and longest > 0 else 0
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        _at_most(len(pattern), MAX_REGEX_CHARS, "characters of a regular expression")
        num += _repeated(pattern)
    return num


def _runs_cost_by(schema: dict[str, object]) -> int:
    """Of the patterns of one schema, and of a grammar that a structural tag holds."""
    cost = 0
    if isinstance(pattern := schema.get("pattern"), str):
        cost += regex_cost(pattern)
    if isinstance(patterns := schema.get("patternProperties"), dict):
        cost += sum(regex_cost(one) for one in patterns if isinstance(one, str))
    if isinstance(grammar := schema.get("grammar"), str):
        cost += rules_cost(grammar)
    return cost


def _check_optional(schema: dict[str, object]) -> None:
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, dict):
        num_optional = len(properties) - (len(required) if isinstance(required, list) else 0)
        _at_most(num_optional, MAX_OPTIONAL, "properties that may be left out")
        if "minProperties" in schema or "maxProperties" in schema:
            _at_most(num_optional, MAX_COUNTED, "properties that may be left out and are counted")


def _check_runs(cost: int) -> None:
    if cost > MAX_RUNS_COST:
        raise BadRequestError(
            "the grammar has too many things in a row that may be left out: it would take too "
            "long to compile",
            field=FIELD,
        )


def _repeated(pattern: str) -> int:
    """What the bounds of a regular expression, or of a grammar, let repeat."""
    num = pattern.count("?")
    for least, _, most in _BOUND.findall(pattern):
        bound = most or least
        num += min(int(bound[:9]), _SATURATED) if bound else 0
    return num


def _at_most(num: int, limit: int, what: str) -> None:
    if num > limit:
        raise BadRequestError(
            f"the grammar has more than {limit} {what}: it would take too long to compile",
            field=FIELD,
        )
