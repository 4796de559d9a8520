"""The code predictor's work for one position in few kernels, each as long as its weights are read.

A frame is sixteen positions, each of which depends on the one before: for a handful of requests the
time is that of reading the weights, if nothing stands between. So what is between two products of a
layer is in the product before or after it: five kernels a layer (norm and projections, attention,
projection and sum, norm and gated product, product and sum), and two for a code. A program of a
product asks for all of its weights at once and keeps them for every row; sums are in float32.
Nothing is drawn and no value is looked at, so that a graph can hold it.

Triton alone is asked for, so that a test can interpret the kernels on a CPU. B rows, N outputs, K
inputs.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normed_linear(
    x_ptr,
    gamma_ptr,
    weight_ptr,
    y_ptr,
    num_outputs,
    eps,
    B: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """y `[B, N]` = RMSNorm(x `[B, K]`) by the transposed weight `[N, K]`."""
    out, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    is_out, is_in = out < num_outputs, k < K
    mask = is_out[:, None] & is_in[None, :]
    weight = tl.load(weight_ptr + out[:, None] * K + k[None, :], mask=mask, other=0.0)
    gamma = tl.load(gamma_ptr + k, mask=is_in, other=0.0).to(tl.float32)
    for row in tl.static_range(B):
        x = tl.load(x_ptr + row * K + k, mask=is_in, other=0.0).to(tl.float32)
        # The scale of a row is a factor of its sums: it is known when they are.
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / K + eps)
        total = tl.sum(weight.to(tl.float32) * (x * gamma)[None, :], axis=1)
        tl.store(y_ptr + row * num_outputs + out, total * scale, mask=is_out)


@triton.jit
def normed_gated_linear(
    x_ptr,
    gamma_ptr,
    weight_ptr,
    y_ptr,
    num_outputs,
    eps,
    B: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """y `[B, N]` = SiLU(gate) * up, both products of RMSNorm(x) with halves of `[2 N, K]`."""
    out, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    is_out, is_in = out < num_outputs, k < K
    mask, at = is_out[:, None] & is_in[None, :], out[:, None] * K + k[None, :]
    gates = tl.load(weight_ptr + at, mask=mask, other=0.0)
    ups = tl.load(weight_ptr + num_outputs * K + at, mask=mask, other=0.0)
    gamma = tl.load(gamma_ptr + k, mask=is_in, other=0.0).to(tl.float32)
    for row in tl.static_range(B):
        x = tl.load(x_ptr + row * K + k, mask=is_in, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / K + eps)
        scaled = (x * gamma)[None, :]
        gate = tl.sum(gates.to(tl.float32) * scaled, axis=1) * scale
        up = tl.sum(ups.to(tl.float32) * scaled, axis=1) * scale
        y = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(y_ptr + row * num_outputs + out, y, mask=is_out)


@triton.jit
def added_linear(
    x_ptr,
    weight_ptr,
    y_ptr,
    num_outputs,
    B: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add x `[B, K]` by the transposed weight `[N, K]` to y `[B, N]`."""
    out, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    is_out, is_in = out < num_outputs, k < K
    mask = is_out[:, None] & is_in[None, :]
    weight = tl.load(weight_ptr + out[:, None] * K + k[None, :], mask=mask, other=0.0)
    for row in tl.static_range(B):
        x = tl.load(x_ptr + row * K + k, mask=is_in, other=0.0).to(tl.float32)
        total = tl.sum(weight.to(tl.float32) * x[None, :], axis=1)
        before = tl.load(y_ptr + row * num_outputs + out, mask=is_out, other=0.0)
        tl.store(y_ptr + row * num_outputs + out, before.to(tl.float32) + total, mask=is_out)


@triton.jit(do_not_specialize=["num_rows", "position"])
def attend(
    qkv_ptr,
    q_gamma_ptr,
    k_gamma_ptr,
    cos_ptr,
    sin_ptr,
    kv_ptr,
    y_ptr,
    num_rows,
    eps,
    position,
    NUM_KV_HEADS: tl.constexpr,
    NUM_QUERIES: tl.constexpr,
    BLOCK_G: tl.constexpr,
    D: tl.constexpr,
    NUM_POSITIONS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """One position of one request and head of keys: its queries over what came before and itself.

    Args:
        qkv_ptr: `[B, (NUM_QUERIES + 2) * NUM_KV_HEADS, D]`
        cos_ptr: of the position, `[D]`, as is `sin_ptr`.
        kv_ptr: `[2, B, NUM_KV_HEADS, NUM_POSITIONS, D]`; this position's are written.
        y_ptr: `[B, NUM_QUERIES * NUM_KV_HEADS, D]`
    """
    request, head = tl.program_id(0), tl.program_id(1)
    g, d, p = tl.arange(0, BLOCK_G), tl.arange(0, D), tl.arange(0, BLOCK_P)
    other = (d + D // 2) % D
    sign = tl.where(d < D // 2, -1.0, 1.0)
    cos, sin = tl.load(cos_ptr + d).to(tl.float32), tl.load(sin_ptr + d).to(tl.float32) * sign
    row_ptr = qkv_ptr + request * (NUM_QUERIES + 2) * NUM_KV_HEADS * D
    is_query = g < NUM_QUERIES
    query = (head * NUM_QUERIES + g) * D
    mask = is_query[:, None]
    q = tl.load(row_ptr + query[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    turned = tl.load(row_ptr + query[:, None] + other[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(q * q, axis=1) / D + eps)[:, None]
    gamma, turned_gamma = tl.load(q_gamma_ptr + d), tl.load(q_gamma_ptr + other)
    q = q * scale * gamma[None, :].to(tl.float32) * cos[None, :]
    q += turned * scale * turned_gamma[None, :].to(tl.float32) * sin[None, :]
    q *= D**-0.5

    key_ptr = row_ptr + (NUM_QUERIES * NUM_KV_HEADS + head) * D
    k, turned_k = tl.load(key_ptr + d).to(tl.float32), tl.load(key_ptr + other).to(tl.float32)
    k_scale = tl.rsqrt(tl.sum(k * k, axis=0) / D + eps)
    k = k * k_scale * tl.load(k_gamma_ptr + d).to(tl.float32) * cos
    k += turned_k * k_scale * tl.load(k_gamma_ptr + other).to(tl.float32) * sin
    v = tl.load(key_ptr + NUM_KV_HEADS * D + d).to(tl.float32)

    keys_ptr = kv_ptr + (request * NUM_KV_HEADS + head) * NUM_POSITIONS * D
    values_ptr = keys_ptr + num_rows * NUM_KV_HEADS * NUM_POSITIONS * D
    tl.store(keys_ptr + position * D + d, k)
    tl.store(values_ptr + position * D + d, v)
    own = tl.sum(q * k[None, :], axis=1)
    is_past = p < position
    past = p[:, None] * D + d[None, :]
    keys = tl.load(keys_ptr + past, mask=is_past[:, None], other=0.0).to(tl.float32)
    values = tl.load(values_ptr + past, mask=is_past[:, None], other=0.0).to(tl.float32)
    scores = tl.sum(q[:, None, :] * keys[None, :, :], axis=2)
    scores = tl.where(is_past[None, :], scores, float("-inf"))
    largest = tl.maximum(tl.max(scores, axis=1), own)
    weights, own = tl.exp(scores - largest[:, None]), tl.exp(own - largest)
    y = tl.sum(weights[:, :, None] * values[None, :, :], axis=1) + own[:, None] * v[None, :]
    y /= (tl.sum(weights, axis=1) + own)[:, None]
    y_row_ptr = y_ptr + request * NUM_QUERIES * NUM_KV_HEADS * D
    tl.store(y_row_ptr + query[:, None] + d[None, :], y, mask=mask)


@triton.jit
def choose(
    logits_ptr,
    noise_ptr,
    noise_stride,
    is_greedy_ptr,
    embedding_ptr,
    codes_ptr,
    codes_stride,
    embed_ptr,
    total_ptr,
    temperature,
    top_p,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """One request's next code, as `CodeSampler.choose` draws it; its embedding, also added to
    `total`."""
    request = tl.program_id(0)
    v, rank, w = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_W)
    logits = tl.load(logits_ptr + request * V + v, mask=v < V, other=float("-inf")) / temperature
    # Whole numbers in the order of the floats; their last bits say where they stood. Values that
    # differ in those bits alone may change places, but the largest is looked for among the floats.
    bits = logits.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    best = tl.topk((bits & -BLOCK_V) | (BLOCK_V - 1 - v), BLOCK_K)
    codes = BLOCK_V - 1 - (best & (BLOCK_V - 1))
    values = tl.load(logits_ptr + request * V + codes, mask=rank < TOP_K, other=float("-inf"))
    values /= temperature
    weights = tl.exp(values - tl.max(values, axis=0))
    chances = weights / tl.sum(weights, axis=0)
    before = tl.cumsum(chances, axis=0) - chances
    chances = tl.where((before < top_p) | (rank == 0), chances, 0.0)
    noise = tl.load(noise_ptr + request * noise_stride + rank, mask=rank < TOP_K, other=1.0)
    is_greedy = tl.load(is_greedy_ptr + request) != 0
    drawn = tl.sum(tl.where(rank == tl.argmax(chances / noise, axis=0), codes, 0), axis=0)
    code = tl.where(is_greedy, tl.argmax(logits, axis=0), drawn)
    tl.store(codes_ptr + request * codes_stride, code.to(tl.int64))
    is_wide = w < WIDTH
    embed = tl.load(embedding_ptr + code * WIDTH + w, mask=is_wide)
    tl.store(embed_ptr + request * WIDTH + w, embed, mask=is_wide)
    total = tl.load(total_ptr + request * WIDTH + w, mask=is_wide)
    tl.store(total_ptr + request * WIDTH + w, total + embed.to(tl.float32), mask=is_wide)
