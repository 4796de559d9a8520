"""The code predictor's kernels say what its plain operations say; a CPU interprets them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import torch
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerCodePredictorConfig,
)
from vllm_omni.model_executor.models.common.code_sampling import CodeSampler
from vllm_omni.model_executor.models.qwen3_omni import code_predictor

class Linear(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x), None

code_predictor.QKVParallelLinear = lambda width, dim, heads, kv_heads, bias, disable_tp: Linear(
    width, dim * (heads + 2 * kv_heads), bias=bias
)
code_predictor.MergedColumnParallelLinear = lambda width, outs, bias, disable_tp: Linear(
    width, sum(outs), bias=bias
)
code_predictor.RowParallelLinear = lambda width, out, bias, disable_tp: Linear(
    width, out, bias=bias
)
from vllm_omni.model_executor.models.qwen3_omni.fused_code_predictor import FusedCodePredictor

torch.set_grad_enabled(False)
torch.manual_seed(0)
config = Qwen3OmniMoeTalkerCodePredictorConfig(
    hidden_size=48, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=16,
    intermediate_size=80, vocab_size=200, num_code_groups=5, attention_bias=False,
)
sampler = CodeSampler(top_k=50, top_p=0.8)
plain = code_predictor.CodePredictor(config, sampler)
for weight in plain.parameters():
    weight.normal_(0, 0.3)
assert FusedCodePredictor.knows(plain)
fused = FusedCodePredictor(plain)
seen = set()
for num_rows in (1, 2, 3, 4):
    assert fused.is_quicker(num_rows)
    noise = sampler.noise(4, [False] * num_rows, [None] * num_rows, torch.device("cpu"))
    is_greedy = torch.arange(num_rows) % 2 == 1
    given = torch.randn(num_rows, 48), torch.randn(num_rows, 48), noise, is_greedy
    (codes, total), (said, summed) = plain(*given), fused(*given)
    assert torch.equal(codes, said), (num_rows, codes, said)
    torch.testing.assert_close(total, summed)
    seen.update(codes.flatten().tolist())
assert len(seen) > 20, "all the same would show nothing"
print("equal")
"""


@pytest.mark.slow
def test_kernels_say_what_plain_operations_say() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.split()[-1:] == ["equal"]
