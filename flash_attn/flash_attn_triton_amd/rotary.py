"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864), in fp32, of queries and keys."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.flash_attn_triton_amd.language import load_rows, start_of, store_rows


@triton.jit
def rotated(
    x, stride, rows, end, cos, sin, angles, positions, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rows of x (.., D) with their first 2 * HALF features rotated by cos and sin (angles, HALF); fp32.

    A pair (a, b) becomes (a cos - b sin, b cos + a sin). A position outside of the tables counts as their nearest one.
    """
    d = tl.arange(0, BLOCK_D)
    if INTERLEAVED:
        angle, partner, first = d // 2, d ^ 1, d % 2 == 0
    else:
        first = d < HALF
        angle, partner = tl.where(first, d, d - HALF), tl.where(first, d + HALF, d - HALF)
    turning = (rows[:, None] < end) & (d[None, :] < 2 * HALF)
    own = load_rows(x, stride, rows, end, D, BLOCK_D, True).to(tl.float32)
    other = tl.load(x + rows[:, None] * stride + partner[None, :], mask=turning, other=0.0).to(tl.float32)
    positions = tl.minimum(tl.maximum(positions, 0), angles - 1)
    entry = tl.cast(positions, tl.int64)[:, None] * HALF + angle[None, :]
    c = tl.load(cos + entry, mask=turning, other=1.0).to(tl.float32)
    s = tl.load(sin + entry, mask=turning, other=0.0).to(tl.float32)
    return own * c + tl.where(first[None, :], -other, other) * s


@triton.jit
def rotate_queries(
    q,
    out,
    q_strides,
    out_strides,
    used,
    cos,
    sin,
    angles,
    Sq,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    OWN_POSITIONS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out (B,Sq,H,D): row i at position used[b] + i or, without OWN_POSITIONS, used[b]. Grid (tiles, H, B)."""
    first, head, b = tl.program_id(0) * BLOCK_M, tl.program_id(1), tl.program_id(2)
    local = tl.arange(0, BLOCK_M)
    positions = tl.load(used + b) + local * 0
    if OWN_POSITIONS:
        positions += first + local
    start = start_of(q, q_strides, b, first, head)
    values = rotated(start, q_strides[1], local, Sq - first, cos, sin, angles, positions, HALF, INTERLEAVED, D, BLOCK_D)
    store_rows(start_of(out, out_strides, b, first, head), out_strides[1], local, Sq - first, values, D, BLOCK_D)
