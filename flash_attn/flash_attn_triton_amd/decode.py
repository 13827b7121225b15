"""Attention over stored keys: a cache or pages, which may be appended to first, and whose keys may be split into ranges
that are combined afterwards (Flash-Decoding). The query heads of one key head share a tile: they read the same keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.flash_attn_triton_amd.language import (
    LN2,
    LOG2E,
    Score,
    capped,
    dot,
    exponents,
    key_range,
    narrowed,
    plus_product,
    sequence,
    softmax_step,
)
from flash_attn.flash_attn_triton_amd.rotary import rotated


@triton.jit
def place_of(slots, inside, b, block_table, table_stride, page, cache_rows, stored_rows):
    """Where slots of sequence b are: (row of k and v, slot in it, whether it is there); rows are pages or of a cache.

    A page or a row that k and v do not have is not there: nothing is read from it or written to it.
    """
    if block_table is not None:
        row = tl.load(block_table + b * table_stride + slots // page, mask=inside, other=0)
        slots = slots % page
        there = inside & (row >= 0) & (row < stored_rows)
    elif cache_rows is not None:
        row = tl.load(cache_rows + b) + tl.zeros_like(slots)
        there = inside & (row >= 0) & (row < stored_rows)
    else:
        row = b
        there = inside
    return tl.cast(row, tl.int64), tl.cast(slots, tl.int64), there


@triton.jit
def append(
    k_new,
    v_new,
    k,
    v,
    k_new_strides,
    v_new_strides,
    k_strides,
    v_strides,
    used,
    added,
    capacity,
    block_table,
    table_stride,
    page,
    cache_rows,
    stored_rows,
    cos,
    sin,
    angles,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """k_new (B,added,Hk,D), rotated, and v_new go to slots used[b] and on. Grid (ceil(added / BLOCK_M), Hk, B)."""
    first, head, b = tl.program_id(0) * BLOCK_M, tl.program_id(1), tl.program_id(2)
    rows = first + tl.arange(0, BLOCK_M)
    slots = tl.load(used + b) + rows
    inside = (rows < added) & (slots >= 0) & (slots < capacity)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    k_source = k_new + tl.cast(b, tl.int64) * k_new_strides[0] + head * k_new_strides[2]
    v_source = v_new + tl.cast(b, tl.int64) * v_new_strides[0] + head * v_new_strides[2]
    row, slot, there = place_of(slots, inside, b, block_table, table_stride, page, cache_rows, stored_rows)
    k_offsets, v_offsets = row * k_strides[0] + slot * k_strides[1], row * v_strides[0] + slot * v_strides[1]
    k_mask = there[:, None] & (d[None, :] < D)
    v_mask = there[:, None] & (dv[None, :] < DV)
    if cos is not None:
        values = rotated(
            k_source, k_new_strides[1], rows, added, cos, sin, angles, slots, HALF, INTERLEAVED, D, BLOCK_D
        )
        values = narrowed(values, k.dtype.element_ty)
    else:
        values = tl.load(k_source + rows[:, None] * k_new_strides[1] + d[None, :], mask=k_mask, other=0.0)
    k_target = k + tl.cast(head, tl.int64) * k_strides[2] + k_offsets[:, None] + d[None, :]
    tl.store(k_target, values, mask=k_mask)
    values = tl.load(v_source + rows[:, None] * v_new_strides[1] + dv[None, :], mask=v_mask, other=0.0)
    tl.store(v + tl.cast(head, tl.int64) * v_strides[2] + v_offsets[:, None] + dv[None, :], values, mask=v_mask)


@triton.jit
def _attend_slots(
    q_tile, k_head, v_head, k_strides, v_strides, begin, end, Sk, pad, b, block_table, table_stride, page, cache_rows,
    stored_rows, diagonal, score, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys [begin, end) of sequence b, which lie in slots from `pad` on.

    A key whose page is not there is NaN, and so are the rows that see it: nobody takes them for results.
    """
    d, dv, local = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV), tl.arange(0, BLOCK_N)
    accumulator = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    m = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    for first_key in range(begin, end, BLOCK_N):
        keys = first_key + local
        inside = keys < Sk
        row, slot, there = place_of(pad + keys, inside, b, block_table, table_stride, page, cache_rows, stored_rows)
        k_offsets, v_offsets = row * k_strides[0] + slot * k_strides[1], row * v_strides[0] + slot * v_strides[1]
        k_mask, v_mask = there[:, None] & (d[None, :] < D), there[:, None] & (dv[None, :] < DV)
        k_tile = tl.load(k_head + k_offsets[:, None] + d[None, :], mask=k_mask, other=0.0)
        s = exponents(capped(dot(q_tile, tl.trans(k_tile)), score), score, diagonal, keys, Sk, True)
        if block_table is not None or cache_rows is not None:
            lost = inside & (there == 0)
            s = tl.where(lost[None, :] & (s > -float("inf")), float("nan"), s)
        p, alpha, m, row_sum = softmax_step(s, m, row_sum, True)
        v_tile = tl.load(v_head + v_offsets[:, None] + dv[None, :], mask=v_mask, other=0.0)
        accumulator = plus_product(accumulator, alpha[:, None], narrowed(p, v_tile.dtype), v_tile)
    return accumulator, row_sum, m


@triton.jit
def attend_stored(
    q, k, v, out, lse, q_strides, k_strides, v_strides, out_strides, lse_strides, split_strides, splits, cu_seqlens_q,
    used_k, added, leftpad_k, block_table, table_stride, page, cache_rows, stored_rows, longest_q, capacity, group,
    scale, softcap, left, right, alibi_slopes, alibi_stride, COMBINED: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out and lse of BLOCK_M (query, head) pairs of one key head over one of `splits` ranges of their keys.

    Grid (ceil(longest_q * group / BLOCK_M) * splits, Hk, B). used_k + added keys are stored, `capacity` without used_k.
    COMBINED: results are parts, a range without keys has an lse of -inf.
    """
    tile, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    kv_head, b = tl.program_id(1), tl.program_id(2)
    q_begin, Sq = sequence(cu_seqlens_q, b, longest_q)
    end_slot, pad = capacity, 0
    if used_k is not None:
        end_slot = tl.minimum(tl.load(used_k + b) + added, capacity)
    if leftpad_k is not None:
        pad = tl.maximum(tl.load(leftpad_k + b), 0)
    Sk = tl.maximum(end_slot - pad, 0)
    first, total = tile * BLOCK_M, Sq * group
    if first >= total:
        return
    pairs = first + tl.arange(0, BLOCK_M)
    i, head = pairs // group, kv_head * group + pairs % group
    real = pairs < total
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    row = tl.cast(q_begin + i, tl.int64)
    b_long = tl.cast(b, tl.int64)
    q_offsets = b_long * q_strides[0] + row * q_strides[1] + head * q_strides[2]
    q_tile = tl.load(q + q_offsets[:, None] + d[None, :], mask=real[:, None] & (d[None, :] < D), other=0.0)
    slope = 0.0
    if alibi_slopes is not None:
        slope = tl.load(alibi_slopes + b * alibi_stride + head, mask=real, other=0.0)[:, None]
    score = Score(scale, softcap, alibi_slopes, slope, left, right)
    diagonal = (i + (Sk - Sq))[:, None]
    last = (tl.minimum(first + BLOCK_M, total) - 1) // group
    begin, _, _, end = key_range(first // group, last, Sk - Sq, Sk, score, BLOCK_N)
    blocks = (tl.maximum(end - begin, 0) + BLOCK_N - 1) // BLOCK_N
    per_split = (blocks + splits - 1) // splits * BLOCK_N
    begin += split * per_split
    end = tl.minimum(end, begin + per_split)

    k_head = k + tl.cast(kv_head, tl.int64) * k_strides[2]
    v_head = v + tl.cast(kv_head, tl.int64) * v_strides[2]
    accumulator, row_sum, m = _attend_slots(
        q_tile, k_head, v_head, k_strides, v_strides, begin, end, Sk, pad, b, block_table, table_stride, page,
        cache_rows, stored_rows, diagonal, score, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    empty = row_sum == 0.0
    accumulator = accumulator / tl.where(empty, 1.0, row_sum)[:, None]
    nothing = -float("inf") if COMBINED else float("inf")
    row_lse = tl.where(empty, nothing, m * LN2 + tl.log(tl.where(empty, 1.0, row_sum)))
    out_offsets = split * split_strides[0] + b_long * out_strides[0] + row * out_strides[1] + head * out_strides[2]
    out_mask = real[:, None] & (dv[None, :] < DV)
    tl.store(out + out_offsets[:, None] + dv[None, :], narrowed(accumulator, out.dtype.element_ty), mask=out_mask)
    lse_offsets = split * split_strides[1] + b_long * lse_strides[0] + row * lse_strides[1] + head * lse_strides[2]
    tl.store(lse + lse_offsets, row_lse, mask=real)


@triton.jit
def combine(
    parts,
    part_lses,
    out,
    lse,
    part_strides,
    out_strides,
    lse_strides,
    split_strides,
    splits,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out = sum of exp(lse_s - lse) out_s over splits s, one row of one head. Grid (rows, H, B)."""
    row, head, b = tl.cast(tl.program_id(0), tl.int64), tl.program_id(1), tl.cast(tl.program_id(2), tl.int64)
    lse_offset = b * lse_strides[0] + row * lse_strides[1] + head * lse_strides[2]
    part_offset = b * part_strides[0] + row * part_strides[1] + head * part_strides[2]
    d = tl.arange(0, BLOCK_DV)
    m = -float("inf")
    for split in range(0, splits):
        m = tl.maximum(m, tl.load(part_lses + split * split_strides[1] + lse_offset))
    reference = tl.where(m == -float("inf"), 0.0, m)
    total = 0.0
    accumulator = tl.zeros((BLOCK_DV,), tl.float32)
    for split in range(0, splits):
        weight = tl.exp2((tl.load(part_lses + split * split_strides[1] + lse_offset) - reference) * LOG2E)
        part = tl.load(parts + split * split_strides[0] + part_offset + d, mask=d < DV, other=0.0)
        accumulator += weight * part
        total += weight
    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    out_offset = b * out_strides[0] + row * out_strides[1] + head * out_strides[2]
    tl.store(out + out_offset + d, narrowed(accumulator / divisor, out.dtype.element_ty), mask=d < DV)
    tl.store(lse + lse_offset, tl.where(empty, float("inf"), reference + tl.log(divisor)))
