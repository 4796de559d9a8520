"""A network's random numbers become its input."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from vllm_omni.errors import ConfigError
from vllm_omni.model_executor.models.smol_voice.voice_graph import NOISE_INPUT, with_noise_input


def network(op_type: str = "RandomNormalLike") -> onnx.ModelProto:
    """Two draws of random numbers of the shape of `x` and of `y`, added to them."""
    info = helper.make_tensor_value_info
    nodes = [
        helper.make_node(op_type, ["x"], ["rx"], name="first"),
        helper.make_node(op_type, ["y"], ["ry"], name="second"),
        helper.make_node("Add", ["x", "rx"], ["out_x"]),
        helper.make_node("Add", ["y", "ry"], ["out_y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "noisy",
        [info("x", TensorProto.FLOAT, ["a", "b"]), info("y", TensorProto.FLOAT, ["c"])],
        [info("out_x", TensorProto.FLOAT, ["a", "b"]), info("out_y", TensorProto.FLOAT, ["c"])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)], ir_version=8)


def run(noise: np.ndarray) -> list[np.ndarray]:
    model = with_noise_input(network())
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    x, y = np.zeros((2, 3), dtype=np.float32), np.zeros(2, dtype=np.float32)
    return list(session.run(["out_x", "out_y"], {"x": x, "y": y, NOISE_INPUT: noise}))


def test_each_draw_takes_the_numbers_after_those_before_it() -> None:
    out_x, out_y = run(np.arange(100, dtype=np.float32))

    assert out_x.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert out_y.tolist() == [6, 7]


def test_too_few_numbers_repeat() -> None:
    out_x, out_y = run(np.arange(4, dtype=np.float32))

    assert out_x.tolist() == [[0, 1, 2], [3, 0, 1]]
    assert out_y.tolist() == [2, 3]


def test_other_random_operators_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be seeded"):
        with_noise_input(network("RandomUniformLike"))


def test_a_network_without_random_numbers_is_refused() -> None:
    model = network()
    del model.graph.node[:2]

    with pytest.raises(ConfigError, match="not a VITS voice"):
        with_noise_input(model)
