"""The voice's random numbers as inputs of its ONNX graph, so that a seed decides them.

VITS draws noise twice inside the graph. onnxruntime seeds those operators once per session, so
a result would depend on what the session spoke before. Here each `RandomNormalLike` reads a
slice of an input instead. Runs in the command that assembles the demo checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_omni.errors import ConfigError

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

NOISE_INPUT = "noise"
"""float32 [num_values]: standard normal numbers; shorter than needed means that they repeat."""


def with_noise_input(model: ModelProto) -> ModelProto:
    """Replace every random operator of `model` (in place) by values of the input `noise`.

    Each operator gets the flat positions that follow those of the operator before it, modulo
    the number of values given.
    """
    from onnx import TensorProto, checker, helper

    graph = model.graph
    if any(
        node.op_type in ("RandomUniformLike", "RandomNormal", "RandomUniform")
        for node in graph.node
    ):
        raise ConfigError("the voice draws random numbers in a way that cannot be seeded")
    nodes = []
    start = ""
    for node in graph.node:
        if node.op_type != "RandomNormalLike":
            nodes.append(node)
            continue
        made, start = _noise_like(node.input[0], node.output[0], start)
        nodes += made
    if not start:
        raise ConfigError("the voice has no RandomNormalLike operator: not a VITS voice")
    del graph.node[:]
    graph.node.extend(nodes)
    graph.input.append(helper.make_tensor_value_info(NOISE_INPUT, TensorProto.FLOAT, ["values"]))
    graph.initializer.extend(
        [
            helper.make_tensor("noise/zero", TensorProto.INT64, [], [0]),
            helper.make_tensor("noise/one", TensorProto.INT64, [], [1]),
        ]
    )
    checker.check_model(model)
    return model


def _noise_like(like: str, output: str, start: str) -> tuple[list[NodeProto], str]:
    """Nodes that write noise of the shape of `like` to `output`, and the next free position."""
    from onnx import helper

    p = f"noise/{output}"
    first = start or "noise/zero"
    nodes = [
        helper.make_node("Shape", [like], [f"{p}/shape"]),
        helper.make_node("Size", [like], [f"{p}/size"]),
        helper.make_node("Add", [first, f"{p}/size"], [f"{p}/end"]),
        helper.make_node("Range", [first, f"{p}/end", "noise/one"], [f"{p}/positions"]),
        helper.make_node("Size", [NOISE_INPUT], [f"{p}/given"]),
        helper.make_node("Mod", [f"{p}/positions", f"{p}/given"], [f"{p}/wrapped"]),
        helper.make_node("Gather", [NOISE_INPUT, f"{p}/wrapped"], [f"{p}/flat"]),
        helper.make_node("Reshape", [f"{p}/flat", f"{p}/shape"], [output]),
    ]
    return nodes, f"{p}/end"
