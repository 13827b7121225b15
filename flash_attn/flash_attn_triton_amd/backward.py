"""Backward pass: row sums, then dk and dv by tiles of keys, then dq by tiles of queries. Nothing is summed atomically,
so gradients are the same to the bit from run to run.

    P = exp(S - lse),  dP = dO V^T,  dS = P * (dP - rowsum(dO * O)),  dV = P^T dO,  dK = scale dS^T Q,  dQ = scale dS K
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.flash_attn_triton_amd.dropout import Dropout, kept, subkey_of
from flash_attn.flash_attn_triton_amd.language import (
    LOG2E,
    Score,
    advanced,
    capped,
    dot,
    exponents,
    key_range,
    load_again,
    load_rows,
    narrowed,
    plus_product,
    query_range,
    sequence,
    slope_of,
    start_of,
    store_rows,
)


@triton.jit
def row_sums(
    out,
    dout,
    dlse,
    delta,
    out_strides,
    dout_strides,
    lse_strides,
    cu_seqlens_q,
    longest_q,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """delta = rowsum(dO * O) - dlse, laid out as the lse. Grid (ceil(longest_q / BLOCK_M), H, B)."""
    first, head, b = tl.program_id(0) * BLOCK_M, tl.program_id(1), tl.program_id(2)
    begin, Sq = sequence(cu_seqlens_q, b, longest_q)
    if first >= Sq:
        return
    local, remaining = tl.arange(0, BLOCK_M), Sq - first
    out = start_of(out, out_strides, b, begin + first, head)
    dout = start_of(dout, dout_strides, b, begin + first, head)
    o_tile = load_rows(out, out_strides[1], local, remaining, DV, BLOCK_DV, True).to(tl.float32)
    do_tile = load_rows(dout, dout_strides[1], local, remaining, DV, BLOCK_DV, True).to(tl.float32)
    total = tl.sum(o_tile * do_tile, 1)
    if dlse is not None:
        total -= tl.load(start_of(dlse, lse_strides, b, begin + first, head) + local, mask=local < remaining, other=0.0)
    tl.store(start_of(delta, lse_strides, b, begin + first, head) + local, total, mask=local < remaining)


@triton.jit
def _row_constants(lse, delta, rows, Sq):
    """Base-2 lse and delta of rows, as columns. A row without keys, or past the end, gets weights of zero."""
    inside = rows < Sq
    row_lse = tl.load(lse + rows, mask=inside, other=float("inf")) * LOG2E
    row_lse = tl.where(row_lse == -float("inf"), float("inf"), row_lse)
    return row_lse[:, None], tl.load(delta + rows, mask=inside, other=0.0)[:, None]


@triton.jit
def _weights(
    q_tile, k_tile, v_tile, do_tile, row_lse, row_delta, rows, first_key, diagonal, Sk, score, dropout,
    M: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """P after dropout without its factor 1 / (1 - p), and dS without the factor `scale`; both (M,N), fp32."""
    cap = capped(dot(q_tile, tl.trans(k_tile)), score)
    p = tl.exp2(exponents(cap, score, diagonal, first_key + tl.arange(0, N), Sk, MASKED) - row_lse)
    dp = dot(do_tile, tl.trans(v_tile))
    dropped = p
    if dropout.rng_state is not None:
        keep = kept(dropout, rows, first_key, M, N)
        dropped = tl.where(keep, p, 0.0)
        dp = tl.where(keep, dp * dropout.keep_scale, 0.0)
    ds = p * (dp - row_delta)
    if score.softcap is not None:
        t = cap / score.softcap
        ds *= 1.0 - t * t
    return dropped, ds


@triton.jit
def _sum_over_queries(
    dk, dv, k_tile, v_tile, k, v, k_stride, v_stride, q, dout, lse, delta, q_stride, dout_stride, begin, end,
    first_key, Sq, Sk, score, dropout, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, M: tl.constexpr, N: tl.constexpr, AGAIN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds to dk and dv of a tile of keys what queries [begin, end) of one head contribute."""
    local, keys = tl.arange(0, M), tl.arange(0, N)
    for first in range(begin, end, M):
        rows = first + local
        k_own = load_again(k, k_stride, keys, Sk - first_key, first, k_tile, D, BLOCK_D, AGAIN)
        v_own = load_again(v, v_stride, keys, Sk - first_key, first, v_tile, DV, BLOCK_DV, AGAIN)
        q_tile = load_rows(advanced(q, q_stride, first), q_stride, local, Sq - first, D, BLOCK_D, MASKED)
        do_tile = load_rows(advanced(dout, dout_stride, first), dout_stride, local, Sq - first, DV, BLOCK_DV, MASKED)
        row_lse, row_delta = _row_constants(lse, delta, rows, Sq)
        p, ds = _weights(
            q_tile, k_own, v_own, do_tile, row_lse, row_delta, rows, first_key, (rows + (Sk - Sq))[:, None], Sk,
            score, dropout, M, N, MASKED,
        )  # fmt: skip
        dv = plus_product(dv, 1.0, tl.trans(narrowed(p, do_tile.dtype)), do_tile)
        dk = plus_product(dk, 1.0, tl.trans(narrowed(ds, q_tile.dtype)), q_tile)
    return dk, dv


@triton.jit
def key_gradients(
    q, k, v, dout, lse, delta, dk, dv, q_strides, k_strides, v_strides, dout_strides, lse_strides, dk_strides,
    dv_strides, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, group, scale, softcap, left, right, alibi_slopes,
    alibi_stride, rng_state, threshold, keep_scale, AGAIN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_N keys, summed over their group's query heads. Grid (ceil(longest_k / BLOCK_N), Hk, B)."""
    first_key, kv_head, b = tl.program_id(0) * BLOCK_N, tl.program_id(1), tl.program_id(2)
    q_begin, Sq = sequence(cu_seqlens_q, b, longest_q)
    k_begin, Sk = sequence(cu_seqlens_k, b, longest_k)
    if first_key >= Sk:
        return
    local, remaining = tl.arange(0, BLOCK_N), Sk - first_key
    k_start = start_of(k, k_strides, b, k_begin + first_key, kv_head)
    v_start = start_of(v, v_strides, b, k_begin + first_key, kv_head)
    k_tile = load_rows(k_start, k_strides[1], local, remaining, D, BLOCK_D, True)
    v_tile = load_rows(v_start, v_strides[1], local, remaining, DV, BLOCK_DV, True)
    last = tl.minimum(first_key + BLOCK_N, Sk) - 1
    dk_sum = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv_sum = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    for head in range(kv_head * group, (kv_head + 1) * group):
        slope = slope_of(alibi_slopes, alibi_stride, b, head)
        score = Score(scale, softcap, alibi_slopes, slope, left, right)
        k0, k1 = subkey_of(rng_state)
        dropout = Dropout(rng_state, k0, k1, b, head, threshold, keep_scale)
        begin, full_begin, full_end, end = query_range(first_key, last, Sk - Sq, Sq, score, BLOCK_M)
        q_start, do_start = start_of(q, q_strides, b, q_begin, head), start_of(dout, dout_strides, b, q_begin, head)
        lse_start = start_of(lse, lse_strides, b, q_begin, head)
        delta_start = start_of(delta, lse_strides, b, q_begin, head)
        if right is not None:
            dk_sum, dv_sum = _sum_over_queries(
                dk_sum, dv_sum, k_tile, v_tile, k_start, v_start, k_strides[1], v_strides[1], q_start, do_start,
                lse_start, delta_start, q_strides[1], dout_strides[1], begin, tl.minimum(full_begin, end), first_key,
                Sq, Sk, score, dropout, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, AGAIN, True,
            )  # fmt: skip
        dk_sum, dv_sum = _sum_over_queries(
            dk_sum, dv_sum, k_tile, v_tile, k_start, v_start, k_strides[1], v_strides[1], q_start, do_start, lse_start,
            delta_start, q_strides[1], dout_strides[1], full_begin, full_end, first_key, Sq, Sk, score, dropout,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, AGAIN, False,
        )  # fmt: skip
        dk_sum, dv_sum = _sum_over_queries(
            dk_sum, dv_sum, k_tile, v_tile, k_start, v_start, k_strides[1], v_strides[1], q_start, do_start, lse_start,
            delta_start, q_strides[1], dout_strides[1], full_end, end, first_key, Sq, Sk, score, dropout,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, AGAIN, True,
        )  # fmt: skip
    if rng_state is not None:
        dv_sum *= keep_scale
    dk = start_of(dk, dk_strides, b, k_begin + first_key, kv_head)
    dv = start_of(dv, dv_strides, b, k_begin + first_key, kv_head)
    store_rows(dk, dk_strides[1], local, remaining, dk_sum * scale, D, BLOCK_D)
    store_rows(dv, dv_strides[1], local, remaining, dv_sum, DV, BLOCK_DV)


@triton.jit
def _sum_over_keys(
    dq, q_tile, do_tile, q, dout, q_stride, dout_stride, remaining, k, v, row_lse, row_delta, k_stride, v_stride,
    begin, end, rows, diagonal, Sk, score, dropout, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, M: tl.constexpr, N: tl.constexpr, AGAIN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds to dq of a tile of queries what keys [begin, end) contribute."""
    local, queries = tl.arange(0, N), tl.arange(0, M)
    for first_key in range(begin, end, N):
        q_own = load_again(q, q_stride, queries, remaining, first_key, q_tile, D, BLOCK_D, AGAIN)
        do_own = load_again(dout, dout_stride, queries, remaining, first_key, do_tile, DV, BLOCK_DV, AGAIN)
        k_tile = load_rows(advanced(k, k_stride, first_key), k_stride, local, Sk - first_key, D, BLOCK_D, MASKED)
        v_tile = load_rows(advanced(v, v_stride, first_key), v_stride, local, Sk - first_key, DV, BLOCK_DV, MASKED)
        _, ds = _weights(
            q_own, k_tile, v_tile, do_own, row_lse, row_delta, rows, first_key, diagonal, Sk, score, dropout,
            M, N, MASKED,
        )  # fmt: skip
        dq = plus_product(dq, 1.0, narrowed(ds, k_tile.dtype), k_tile)
    return dq


@triton.jit
def query_gradients(
    q, k, v, dout, lse, delta, dq, q_strides, k_strides, v_strides, dout_strides, lse_strides, dq_strides,
    cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, group, scale, softcap, left, right, alibi_slopes, alibi_stride,
    rng_state, threshold, keep_scale, AGAIN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK_M queries. Grid (ceil(longest_q / BLOCK_M), H, B)."""
    tile, head, b = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q_begin, Sq = sequence(cu_seqlens_q, b, longest_q)
    k_begin, Sk = sequence(cu_seqlens_k, b, longest_k)
    first = tile * BLOCK_M
    if first >= Sq:
        return
    local, remaining = tl.arange(0, BLOCK_M), Sq - first
    rows = first + local
    q_start = start_of(q, q_strides, b, q_begin + first, head)
    do_start = start_of(dout, dout_strides, b, q_begin + first, head)
    q_tile = load_rows(q_start, q_strides[1], local, remaining, D, BLOCK_D, True)
    do_tile = load_rows(do_start, dout_strides[1], local, remaining, DV, BLOCK_DV, True)
    row_lse, row_delta = _row_constants(
        start_of(lse, lse_strides, b, q_begin, head), start_of(delta, lse_strides, b, q_begin, head), rows, Sq
    )
    k_start = start_of(k, k_strides, b, k_begin, head // group)
    v_start = start_of(v, v_strides, b, k_begin, head // group)
    diagonal = (rows + (Sk - Sq))[:, None]
    slope = slope_of(alibi_slopes, alibi_stride, b, head)
    score = Score(scale, softcap, alibi_slopes, slope, left, right)
    k0, k1 = subkey_of(rng_state)
    dropout = Dropout(rng_state, k0, k1, b, head, threshold, keep_scale)
    last = tl.minimum(first + BLOCK_M, Sq) - 1
    begin, full_begin, full_end, end = key_range(first, last, Sk - Sq, Sk, score, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if left is not None:
        total = _sum_over_keys(
            total, q_tile, do_tile, q_start, do_start, q_strides[1], dout_strides[1], remaining, k_start, v_start,
            row_lse, row_delta, k_strides[1], v_strides[1], begin, tl.minimum(full_begin, end), rows, diagonal, Sk,
            score, dropout, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, AGAIN, True,
        )  # fmt: skip
    total = _sum_over_keys(
        total, q_tile, do_tile, q_start, do_start, q_strides[1], dout_strides[1], remaining, k_start, v_start,
        row_lse, row_delta, k_strides[1], v_strides[1], full_begin, full_end, rows, diagonal, Sk, score, dropout,
        D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, AGAIN, False,
    )  # fmt: skip
    total = _sum_over_keys(
        total, q_tile, do_tile, q_start, do_start, q_strides[1], dout_strides[1], remaining, k_start, v_start,
        row_lse, row_delta, k_strides[1], v_strides[1], full_end, end, rows, diagonal, Sk, score, dropout,
        D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, AGAIN, True,
    )  # fmt: skip
    dq = start_of(dq, dq_strides, b, q_begin + first, head)
    store_rows(dq, dq_strides[1], local, remaining, total * scale, D, BLOCK_D)
