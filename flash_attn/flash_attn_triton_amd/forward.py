"""Forward pass: one program computes a tile of BLOCK_M queries of one head (FlashAttention-2, Dao 2023)."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.flash_attn_triton_amd.dropout import Dropout, kept, subkey_of
from flash_attn.flash_attn_triton_amd.language import (
    LN2,
    Score,
    advanced,
    capped,
    dot,
    exponents,
    key_range,
    load_rows,
    narrowed,
    plus_product,
    sequence,
    slope_of,
    softmax_step,
    start_of,
    store_rows,
    stored_keys,
)


@triton.jit
def _attend(
    accumulator,
    row_sum,
    m,
    q,
    k,
    v,
    k_stride,
    v_stride,
    rows,
    diagonal,
    begin,
    end,
    Sk,
    score,
    dropout,
    D: tl.constexpr,
    DV: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Online softmax over keys [begin, end); MASKED where not every row sees all of them."""
    local = tl.arange(0, N)
    for first_key in range(begin, end, N):
        k_tile = load_rows(advanced(k, k_stride, first_key), k_stride, local, Sk - first_key, D, BLOCK_D, MASKED)
        s = capped(dot(q, tl.trans(k_tile)), score)
        s = exponents(s, score, diagonal, first_key + local, Sk, MASKED)
        p, alpha, m, row_sum = softmax_step(s, m, row_sum, MASKED)
        if dropout.rng_state is not None:
            p = tl.where(kept(dropout, rows, first_key, M, N), p, 0.0)
        v_tile = load_rows(advanced(v, v_stride, first_key), v_stride, local, Sk - first_key, DV, BLOCK_DV, MASKED)
        accumulator = plus_product(accumulator, alpha[:, None], narrowed(p, v_tile.dtype), v_tile)
    return accumulator, row_sum, m


@triton.jit
def attention_forward(
    q, k, v, out, lse, q_strides, k_strides, v_strides, out_strides, lse_strides, cu_seqlens_q, cu_seqlens_k, used_k,
    leftpad_k, longest_q, longest_k, group, scale, softcap, left, right, alibi_slopes, alibi_stride, rng_state,
    threshold, keep_scale, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out (B,Sq,H,Dv) and lse (B,H,Sq), or packed; grid (ceil(longest_q / BLOCK_M), H, B).

    group: query heads per key head. left, right: the window, causal included. threshold, keep_scale: a weight stays
    whose random byte is <= threshold, times keep_scale.
    """
    # Under a causal mask the last queries have the most keys: they begin first.
    tile, head, b = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q_begin, Sq = sequence(cu_seqlens_q, b, longest_q)
    k_begin, Sk = stored_keys(cu_seqlens_k, used_k, leftpad_k, b, longest_k)
    first = tile * BLOCK_M
    if first >= Sq:
        return
    local = tl.arange(0, BLOCK_M)
    rows, remaining = first + local, Sq - first
    q = start_of(q, q_strides, b, q_begin + first, head)
    k = start_of(k, k_strides, b, k_begin, head // group)
    v = start_of(v, v_strides, b, k_begin, head // group)
    q_tile = load_rows(q, q_strides[1], local, remaining, D, BLOCK_D, True)
    diagonal = (rows + (Sk - Sq))[:, None]
    slope = slope_of(alibi_slopes, alibi_stride, b, head)
    score = Score(scale, softcap, alibi_slopes, slope, left, right)
    k0, k1 = subkey_of(rng_state)
    dropout = Dropout(rng_state, k0, k1, b, head, threshold, keep_scale)
    last = tl.minimum(first + BLOCK_M, Sq) - 1
    begin, full_begin, full_end, end = key_range(first, last, Sk - Sq, Sk, score, BLOCK_N)

    accumulator = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    m = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    if left is not None:
        accumulator, row_sum, m = _attend(
            accumulator, row_sum, m, q_tile, k, v, k_strides[1], v_strides[1], rows, diagonal, begin,
            tl.minimum(full_begin, end), Sk, score, dropout, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, True,
        )  # fmt: skip
    accumulator, row_sum, m = _attend(
        accumulator, row_sum, m, q_tile, k, v, k_strides[1], v_strides[1], rows, diagonal, full_begin, full_end, Sk,
        score, dropout, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, False,
    )  # fmt: skip
    accumulator, row_sum, m = _attend(
        accumulator, row_sum, m, q_tile, k, v, k_strides[1], v_strides[1], rows, diagonal, full_end, end, Sk, score,
        dropout, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, True,
    )  # fmt: skip

    empty = row_sum == 0.0
    if rng_state is not None:
        accumulator = accumulator * keep_scale
    accumulator = accumulator / tl.where(empty, 1.0, row_sum)[:, None]
    row_lse = tl.where(empty, float("inf"), m * LN2 + tl.log(tl.where(empty, 1.0, row_sum)))
    out = start_of(out, out_strides, b, q_begin + first, head)
    store_rows(out, out_strides[1], local, remaining, accumulator, DV, BLOCK_DV)
    tl.store(start_of(lse, lse_strides, b, q_begin + first, head) + local, row_lse, mask=local < remaining)
