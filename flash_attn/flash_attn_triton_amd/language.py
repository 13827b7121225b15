"""What the Triton kernels share: addresses of sequences, scores, visible ranges, products.

An optional argument of a kernel is None where it is not given, which Triton treats as a compile-time constant: each
combination of features is its own specialization, without flags. Strides come as tuples (batch, row, head), in
elements; the last dimension has stride 1. The batch stride of packed tensors is 0: `sequence` says where they begin.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import triton
import triton.language as tl

# Triton reads this when a kernel is defined.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
INTERPRETED = tl.constexpr(IS_INTERPRETED)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def dot(a, b):
    """Matrix product with fp32 accumulation; fp32 operands are not shortened to tf32."""
    if INTERPRETED:
        # The interpreter keeps bf16 as bit patterns, which its matrix product does not know.
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def plus_product(total, factor, a, b):
    """total * factor + a b.

    In fp32 the product of a tile is summed from zero and then added, so that a sum over Sk keys has the rounding errors
    of Sk / tile + tile additions, not of Sk. A plain sum would be merged into the product, which then begins at total.
    """
    if a.dtype == tl.float32:
        return tl.fma(total, tl.zeros_like(total) + factor, dot(a, b))
    else:
        return total * factor + dot(a, b)


@triton.jit
def narrowed(x, dtype: tl.constexpr):
    """fp32 x rounded to nearest, ties to even, as GPUs do; the interpreter would cut bf16 off."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return bits.to(tl.float32, bitcast=True).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def sequence(cu_seqlens, b, longest):
    """(first row in a packed tensor, length) of sequence b; of a dense batch (0, longest)."""
    if cu_seqlens is None:
        return 0, longest
    else:
        begin = tl.load(cu_seqlens + b)
        return begin, tl.load(cu_seqlens + b + 1) - begin


@triton.jit
def stored_keys(cu_seqlens, used, leftpad, b, longest):
    """(first row, number of keys) of sequence b, of which only rows leftpad[b] to used[b] - 1 count."""
    begin, length = sequence(cu_seqlens, b, longest)
    if used is not None:
        length = tl.load(used + b)
    if leftpad is not None:
        pad = tl.load(leftpad + b)
        begin += pad
        length = tl.maximum(length - pad, 0)
    return begin, length


@triton.jit
def start_of(pointer, strides, b, row, head):
    """Address of a row, in 64-bit arithmetic; offsets within a tile then fit 32 bits."""
    offset = tl.cast(b, tl.int64) * strides[0] + tl.cast(row, tl.int64) * strides[1]
    return pointer + offset + tl.cast(head, tl.int64) * strides[2]


@triton.jit
def advanced(pointer, stride, rows):
    """The address `rows` rows on."""
    return pointer + tl.cast(rows, tl.int64) * stride


@triton.jit
def load_rows(pointer, stride, rows, end, FEATURES: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Rows x features of a matrix; zeros past `end` (when MASKED) and past FEATURES."""
    features = tl.arange(0, BLOCK)
    addresses = pointer + rows[:, None] * stride + features[None, :]
    if MASKED:
        return tl.load(addresses, mask=(rows[:, None] < end) & (features[None, :] < FEATURES), other=0.0)
    elif FEATURES != BLOCK:
        return tl.load(addresses, mask=features[None, :] < FEATURES, other=0.0)
    else:
        return tl.load(addresses)


@triton.jit
def load_again(
    pointer, stride, rows, end, turn, tile, FEATURES: tl.constexpr, BLOCK: tl.constexpr, AGAIN: tl.constexpr
):
    """`tile`, the rows loaded before a loop or, with AGAIN, those rows loaded once more, so that none need be kept.

    turn: the loop's variable, at least 0. An offset of turn >> 31, which is zero, keeps compilers from taking the load
    out of the loop.
    """
    if AGAIN:
        return load_rows(advanced(pointer, stride, turn >> 31), stride, rows, end, FEATURES, BLOCK, True)
    else:
        return tile


@triton.jit
def store_rows(pointer, stride, rows, end, values, FEATURES: tl.constexpr, BLOCK: tl.constexpr):
    features = tl.arange(0, BLOCK)
    inside = (rows[:, None] < end) & (features[None, :] < FEATURES)
    tl.store(
        pointer + rows[:, None] * stride + features[None, :], narrowed(values, pointer.dtype.element_ty), mask=inside
    )


@triton.jit
def tanh(x):
    """(1 - e) / (1 + e) with e = exp(-2 |x|), which cannot overflow."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    return tl.where(x < 0, -1.0, 1.0) * ((1.0 - e) / (1.0 + e))


class Score(NamedTuple):
    """How q.k becomes a score, for one head. What is None does not apply.

    Kernels make it themselves: up to Triton 3.6 a function cannot return None, so neither a tuple that holds one.
    """

    scale: Any
    softcap: Any
    alibi_slopes: Any
    slope: Any  # of the head, a number also without ALiBi
    left: Any  # the window, causal included
    right: Any


@triton.jit
def slope_of(alibi_slopes, alibi_stride, b, head):
    if alibi_slopes is None:
        return 0.0
    else:
        return tl.load(alibi_slopes + b * alibi_stride + head)


@triton.jit
def capped(products, score):
    """scale * q.k or, with a cap, softcap * tanh(scale * q.k / softcap)."""
    s = products * score.scale
    if score.softcap is not None:
        s = tanh(s / score.softcap) * score.softcap
    return s


@triton.jit
def exponents(s, score, diagonal, keys, Sk, MASKED: tl.constexpr):
    """Base-2 exponents of capped scores: ALiBi added and, if MASKED, -inf where a row does not see a key.

    diagonal: the key position i + Sk - Sq that each row stands at, as a column. It sees keys of
    [diagonal - left, diagonal + right] below Sk.
    """
    if score.alibi_slopes is not None:
        s -= score.slope * tl.abs(diagonal - keys[None, :]).to(tl.float32)
    s = s * LOG2E
    if MASKED:
        seen = keys[None, :] < Sk
        if score.left is not None:
            seen &= keys[None, :] >= diagonal - score.left
        if score.right is not None:
            seen &= keys[None, :] <= diagonal + score.right
        s = tl.where(seen, s, -float("inf"))
    return s


@triton.jit
def key_range(first, last, shift, Sk, score, BLOCK: tl.constexpr):
    """Keys that rows first..last see, by blocks: (begin, full_begin, full_end, end).

    Every row sees all keys of [full_begin, full_end); of the rest of [begin, end) some do. All but `end` are multiples
    of BLOCK, and full_begin <= full_end.
    """
    begin, full_begin, end, full_end = 0, 0, Sk, Sk
    if score.right is not None:
        end = tl.minimum(end, last + shift + score.right + 1)
        full_end = tl.minimum(full_end, first + shift + score.right + 1)
    if score.left is not None:
        begin = tl.maximum(first + shift - score.left, 0) // BLOCK * BLOCK
        full_begin = (tl.maximum(last + shift - score.left, 0) + BLOCK - 1) // BLOCK * BLOCK
    full_end = tl.maximum(tl.maximum(full_end, 0) // BLOCK * BLOCK, full_begin)
    return begin, full_begin, full_end, end


@triton.jit
def query_range(first, last, shift, Sq, score, BLOCK: tl.constexpr):
    """Rows that see any of keys first..last, by blocks: (begin, full_begin, full_end, end), as in `key_range`."""
    begin, full_begin, end, full_end = 0, 0, Sq, Sq
    if score.right is not None:
        begin = tl.maximum(first - shift - score.right, 0) // BLOCK * BLOCK
        full_begin = (tl.maximum(last - shift - score.right, 0) + BLOCK - 1) // BLOCK * BLOCK
    if score.left is not None:
        end = tl.minimum(end, last - shift + score.left + 1)
        full_end = tl.minimum(full_end, first - shift + score.left + 1)
    full_end = tl.maximum(tl.maximum(full_end, 0) // BLOCK * BLOCK, full_begin)
    return begin, full_begin, full_end, end


@triton.jit
def softmax_step(s, m, row_sum, MASKED: tl.constexpr):
    """One block of online softmax in base 2: (weights, factor of earlier sums, row maximum, row sum)."""
    m_new = tl.maximum(m, tl.max(s, 1))
    reference = m_new
    if MASKED:
        # A row without a visible key so far: exp2(-inf - -inf) would be NaN.
        reference = tl.where(m_new == -float("inf"), 0.0, m_new)
    p = tl.exp2(s - reference[:, None])
    alpha = tl.exp2(m - reference)
    return p, alpha, m_new, row_sum * alpha + tl.sum(p, 1)
