"""Dropout: the project's Philox mask (csrc/core/dropout.h), bit for bit, and the signed weights S_dmask.

    subkey = philox(counter = (offset_lo, offset_hi, 0, 0), key = seed), its first two words
    word   = philox(counter = ((j / 64) * 4 + (j / 4) % 4, i, b, h), key = subkey)[(j / 16) % 4]
    byte   = byte j % 4 of word;  kept iff byte <= floor(255 * (1 - p))

Four calls give the bytes of 64 keys. A tile of keys is a multiple of 64, or 16 or 32 of them, and begins at a multiple
of its size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flash_attn.flash_attn_triton_amd.language import (
    Score,
    advanced,
    capped,
    dot,
    exponents,
    load_rows,
    narrowed,
    sequence,
    slope_of,
    start_of,
    stored_keys,
)


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10 (Salmon et al., SC 2011) on uint32."""
    multiplier_a = tl.full((), 0xD2511F53, tl.uint32)
    multiplier_b = tl.full((), 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        a, b = c0, c2
        c0 = tl.umulhi(b, multiplier_b) ^ c1 ^ k0
        c2 = tl.umulhi(a, multiplier_a) ^ c3 ^ k1
        c1 = b * multiplier_b
        c3 = a * multiplier_a
        k0 = k0 + tl.full((), 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full((), 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


class Dropout(NamedTuple):
    """Of one head. rng_state is None where there is no dropout."""

    rng_state: Any
    k0: Any
    k1: Any
    b: Any
    head: Any
    threshold: Any
    keep_scale: Any


@triton.jit
def subkey_of(rng_state):
    """The key of a call's masks, two words; zeros without dropout."""
    zero = tl.full((), 0, tl.uint32)
    if rng_state is None:
        return zero, zero
    else:
        seed = tl.load(rng_state).to(tl.uint64, bitcast=True)
        offset = tl.load(rng_state + 1).to(tl.uint64, bitcast=True)
        offset_low, offset_high = offset.to(tl.uint32), (offset >> 32).to(tl.uint32)
        k0, k1, _, _ = philox4x32(offset_low, offset_high, zero, zero, seed.to(tl.uint32), (seed >> 32).to(tl.uint32))
        return k0, k1


@triton.jit
def kept(dropout, rows, first_key, M: tl.constexpr, N: tl.constexpr):
    """bool (M,N): which weights of M rows and the N keys from first_key on stay."""
    CALLS: tl.constexpr = N // 16 if N > 64 else 4
    calls = first_key // 64 * 4 + tl.arange(0, CALLS)
    counter = tl.broadcast_to(calls[None, :], (M, CALLS)).to(tl.uint32)
    row = tl.broadcast_to(rows[:, None], (M, CALLS)).to(tl.uint32)
    zero = tl.zeros((M, CALLS), tl.uint32)
    b, head = zero + tl.cast(dropout.b, tl.uint32), zero + tl.cast(dropout.head, tl.uint32)
    w0, w1, w2, w3 = philox4x32(counter, row, b, head, dropout.k0, dropout.k1)
    # Keys count by byte first, then by call, then by word.
    word = first_key % 64 // 16
    if N == 16:
        words = tl.where(word == 0, w0, tl.where(word == 1, w1, tl.where(word == 2, w2, w3)))
    elif N == 32:
        words = tl.permute(tl.join(tl.where(word == 0, w0, w2), tl.where(word == 0, w1, w3)), (0, 2, 1))
    else:
        # (.., 2, 2) reads as word 0, 1, 2, 3.
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
        words = tl.permute(tl.reshape(words, (M, N // 64, 4, 4)), (0, 1, 3, 2))
    words = tl.reshape(words, (M, N // 4, 1))
    bytes_ = (words >> (8 * tl.arange(0, 4)).to(tl.uint32)[None, None, :]) & 255
    return tl.reshape(bytes_, (M, N)).to(tl.int32) <= dropout.threshold


@triton.jit
def signed_weights(
    q,
    k,
    weights,
    q_strides,
    k_strides,
    weights_strides,
    cu_seqlens_q,
    cu_seqlens_k,
    used_k,
    leftpad_k,
    longest_q,
    longest_k,
    group,
    scale,
    softcap,
    left,
    right,
    alibi_slopes,
    alibi_stride,
    rng_state,
    threshold,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """S_dmask (B,H,Sq,Sk), for tests: exp(score - row maximum), negative where dropped. Grid as in the forward pass."""
    first, head, b = tl.program_id(0) * BLOCK_M, tl.program_id(1), tl.program_id(2)
    q_begin, Sq = sequence(cu_seqlens_q, b, longest_q)
    k_begin, Sk = stored_keys(cu_seqlens_k, used_k, leftpad_k, b, longest_k)
    if first >= Sq:
        return
    local, keys_local = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    rows = first + local
    diagonal = (rows + (Sk - Sq))[:, None]
    q = start_of(q, q_strides, b, q_begin + first, head)
    k = start_of(k, k_strides, b, k_begin, head // group)
    weights = start_of(weights, weights_strides, b, first, head)
    q_tile = load_rows(q, q_strides[1], local, Sq - first, D, BLOCK_D, True)
    slope = slope_of(alibi_slopes, alibi_stride, b, head)
    score = Score(scale, softcap, alibi_slopes, slope, left, right)
    k0, k1 = subkey_of(rng_state)
    dropout = Dropout(rng_state, k0, k1, b, head, threshold, 1.0)
    m = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    for turn in tl.static_range(2):
        for first_key in range(0, Sk, BLOCK_N):
            keys = first_key + keys_local
            start = advanced(k, k_strides[1], first_key)
            k_tile = load_rows(start, k_strides[1], keys_local, Sk - first_key, D, BLOCK_D, True)
            s = exponents(capped(dot(q_tile, tl.trans(k_tile)), score), score, diagonal, keys, Sk, True)
            if turn == 0:
                m = tl.maximum(m, tl.max(s, 1))
            else:
                p = tl.exp2(s - tl.where(m == -float("inf"), 0.0, m)[:, None])
                keep = kept(dropout, rows, first_key, BLOCK_M, BLOCK_N)
                inside = (rows[:, None] < Sq) & (keys[None, :] < Sk)
                p = narrowed(tl.where(keep, p, -p), weights.dtype.element_ty)
                tl.store(weights + local[:, None] * weights_strides[1] + keys[None, :], p, mask=inside)
