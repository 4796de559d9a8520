"""Grammars that would keep the compiler busy are refused by a look at them."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest
from vllm.sampling_params import StructuredOutputsParams

from vllm_omni.engine.grammar_bounds import check_grammar
from vllm_omni.errors import BadRequestError


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def texts(num: int, length: int) -> dict[str, Any]:
    return {"properties": {f"p{i}": {"type": "string", "maxLength": length} for i in range(num)}}


JSON_RULES = r"""
root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
USUAL: list[dict[str, Any]] = [
    {"json": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 500}}}},
    {"json": json.dumps(texts(8, 500))},
    {"json": nested(20)},
    {"json": texts(200, 5)},
    {"json": {"enum": [f"value {i}" for i in range(3000)]}},
    {"json": {"type": "array", "maxItems": 100_000, "items": {"type": "integer"}}},
    {"json": "no JSON at all"},
    {"json_object": True},
    {"regex": r"\d{4}-\d{2}-\d{2}T[a-z]{1,300}"},
    {"regex": "|".join(f"word{i}" for i in range(400))},
    {"choice": ["yes", "no"]},
    {"grammar": 'root ::= "a" [a-z]{1,50}'},
    {"structural_tag": '{"type": "structural_tag"}'},
    {"regex": r"\{[ ]?" + r'"key"[ ]?:[ ]?"[^"]*"[ ]?,[ ]?' * 60 + r"\}"},
    {"regex": r"\s*(" + "|".join(f"word{i}" for i in range(500)) + ")"},
    {"regex": r"(?:https?://)?(?:www\.)?[a-z0-9]+(?:\.[a-z]+)*(?::\d+)?(?:/[^?#]*)?(?:#.*)?"},
    {"grammar": JSON_RULES},
    {"json": {"properties": {f"p{i}": {} for i in range(60)}, "minProperties": 1}},
]
BOMBS: list[dict[str, Any]] = [
    {"json": texts(100, 10_000)},
    {"json": json.dumps(texts(100, 10_000))},
    {"json": {"anyOf": [{"type": "string", "minLength": 900}] * 50}},
    {"json": {"properties": {f"p{i}": {"type": "string"} for i in range(2000)}}},
    {"json": nested(60)},
    {"json": "[" * 200_000},
    {"json": {"enum": list(range(20_000))}},
    {"json": {"const": "x" * 100_000}},
    {"json": {"type": "string", "pattern": "(a{1,1000}b{1,1000}){1,1000}" * 20}},
    {"json": {"type": "string", "pattern": "a" * 5000}},
    {"regex": "(.{1,999999999999999999999}x)" * 20},
    {"regex": "a" * 5000},
    {"regex": ".?" * 2040},
    {"regex": "a?" * 400},
    {"regex": "(a|b)*" * 100},
    {"regex": "(" * 100 + "a" + "|b)*" * 100},
    {"regex": "(a|)" * 100},
    {"regex": "(?=" + "[a-z]?" * 100 + ")b"},
    {"json": {"type": "string", "pattern": "[a-z]?" * 100}},
    {"json": {"patternProperties": {"[a-z]?" * 100: {"type": "string"}}}},
    {"json": {"properties": {f"p{i}": {} for i in range(200)}, "minProperties": 100}},
    {"grammar": "root ::= " + '"a"? ' * 200},
    {"grammar": "root ::= " + "x " * 200 + '\nx ::= y\ny ::= "a" | ""'},
    {"grammar": "start: " + "[A] " * 200 + '\nA: "a"'},
    {"grammar": "start: /" + "[a-z]?" * 200 + "/"},
    {"structural_tag": json.dumps({"format": {"type": "regex", "pattern": "a?" * 400}})},
    {"structural_tag": json.dumps({"format": {"grammar": "root ::= " + '"a"? ' * 200}})},
    {"choice": ["x"] * 100_000},
    {"choice": ["x" * 100_000]},
    {"grammar": 'root ::= "a"\n' * 10_000},
    {"grammar": "root ::= " + "[a-z]{1,900} " * 50},
    {"structural_tag": json.dumps({"format": texts(100, 10_000)})},
    {"json_object": True, "whitespace_pattern": "[ ]{1,900}" * 50},
]


@pytest.mark.parametrize("wanted", USUAL, ids=lambda wanted: str(wanted)[:40])
def test_usual_grammars_pass(wanted: dict[str, Any]) -> None:
    check_grammar(StructuredOutputsParams(**wanted))


@pytest.mark.parametrize("wanted", BOMBS, ids=lambda wanted: str(wanted)[:40])
def test_bombs_are_refused(wanted: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError, match=r"too long to compile|too deep") as caught:
        check_grammar(StructuredOutputsParams(**wanted))
    assert caught.value.field == "structured_outputs"


@pytest.mark.parametrize(
    "text",
    ["(" * 4096, "[" * 4096, "(?<" * 1300, "\\" * 4096, "(a?" * 1300],
    ids=lambda text: text[:5],
)
def test_malformed_patterns_are_looked_at_quickly(text: str) -> None:
    began_s = time.thread_time()
    with contextlib.suppress(BadRequestError):
        check_grammar(StructuredOutputsParams(regex=text))
    assert time.thread_time() - began_s < 2.0


@pytest.mark.parametrize("text", ['"', "[", "/", "a", "-", "{ ", "~ ", "( "])
def test_malformed_rules_are_looked_at_quickly(text: str) -> None:
    began_s = time.thread_time()
    with contextlib.suppress(BadRequestError):
        check_grammar(StructuredOutputsParams(grammar=f"root ::= {text * 30_000}"))
    assert time.thread_time() - began_s < 2.0


def test_long_chains_of_rules_are_looked_at_quickly() -> None:
    chain = "\n".join(f"r{i} ::= r{i + 1} x" for i in range(3000))
    began_s = time.thread_time()
    with pytest.raises(BadRequestError, match="left out"):
        check_grammar(StructuredOutputsParams(grammar=f'{chain}\nr3000 ::= "a"?\nx ::= ""'))
    assert time.thread_time() - began_s < 2.0
