"""Attention written plainly, as the reference that every test compares with.

Scaled dot-product attention (Vaswani et al. 2017), grouped queries (Ainslie et al. 2023), ALiBi (Press et al. 2022),
logit soft cap (Gemma 2, 2024), sliding windows (Beltagy et al. 2020), dropout on the probabilities (Srivastava et al.
2014). Everything is quadratic in memory and the backward pass is torch's autograd over the forward pass.

Letters: B batch, H query heads, Hk key/value heads, Sq / Sk query / key length, D / Dv head dims, Tq / Tk tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import List, Optional, Tuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Arithmetic:
    """How the reference computes: in `compute`, every intermediate rounded to `storage` as by torch ops of that dtype.

    `reordered` multiplies k by the softmax scale before the product rather than the product after it, and takes
    queries, keys and features backwards, so that two evaluations of one precision differ, by rounding alone.
    """

    compute: torch.dtype
    storage: torch.dtype
    reordered: bool = False

    def stored(self, x: Tensor) -> Tensor:
        """x rounded to the storage dtype; its gradient is rounded on the way back as well."""
        return x.to(self.storage).to(self.compute)


EXACT = Arithmetic(torch.float64, torch.float64)


def same_precision(dtype: torch.dtype) -> Arithmetic:
    """What torch's own ops of `dtype` give (fp16 and bf16 products accumulate in fp32), operations reordered."""
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    return Arithmetic(compute, dtype, reordered=True)


@dataclass(frozen=True)
class Score:
    """Everything between q.k and the probabilities. `keep` is the dropout mask, bool (B,H,Sq,Sk), True = kept."""

    scale: Optional[float] = None
    causal: bool = False
    window: Tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Optional[Tensor] = field(default=None, compare=False)
    dropout_p: float = 0.0
    keep: Optional[Tensor] = field(default=None, compare=False)
    bias: Optional[Tensor] = field(default=None, compare=False)  # (B|1,H|1,Sq|1,Sk), differentiable
    mask: Optional[Tensor] = field(default=None, compare=False)  # bool (B|1,H|1,Sq|1,Sk|1), True = kept
    sink: Optional[Tensor] = field(default=None, compare=False)  # (H), differentiable


@dataclass
class Result:
    out: Tensor  # (B,Sq,H,Dv) or (Tq,H,Dv)
    lse: Tensor  # (B,H,Sq) or (H,Tq), +inf for a row that sees no key
    probs: Optional[Tensor] = None  # (B,H,Sq,Sk), before dropout; dense only
    grads: Tuple[Tensor, ...] = ()  # dq, dk, dv, then those of bias and sink where given


def visible(Sq: int, Sk: int, causal: bool, window: Tuple[int, int], max_seqlen_k: Optional[int] = None) -> Tensor:
    """bool (Sq,Sk): which keys each query sees. Both masks are aligned to the bottom right corner.

    A side that is negative, or not smaller than the longest key sequence of the call, is unbounded.
    """
    longest = Sk if max_seqlen_k is None else max_seqlen_k
    left, right = (w if 0 <= w < longest else -1 for w in window)
    if causal:
        right = 0
    diagonal = torch.arange(Sq)[:, None] + Sk - Sq
    j = torch.arange(Sk)[None, :]
    mask = torch.ones(Sq, Sk, dtype=torch.bool)
    if left >= 0:
        mask &= j >= diagonal - left
    if right >= 0:
        mask &= j <= diagonal + right
    return mask


def alibi_bias(slopes: Tensor, B: int, Sq: int, Sk: int) -> Tensor:
    """-slope * |i + Sk - Sq - j| as (B,H,Sq,Sk), from slopes (H) or (B,H)."""
    slopes = slopes.expand(B, slopes.shape[-1])
    distance = (torch.arange(Sq)[:, None] + Sk - Sq - torch.arange(Sk)[None, :]).abs()
    return -slopes[:, :, None, None] * distance.to(slopes.dtype)


def forward(
    q: Tensor, k: Tensor, v: Tensor, score: Score, arith: Arithmetic = EXACT, max_seqlen_k: Optional[int] = None
) -> Result:
    """q (B,Sq,H,D), k (B,Sk,Hk,D), v (B,Sk,Hk,Dv), in arith.compute; backwards if arith.reordered, as the result."""
    (B, Sq, H, D), (Sk, Hk) = q.shape, k.shape[1:3]
    scale = D**-0.5 if score.scale is None else score.scale
    q = q.permute(0, 2, 1, 3)
    k, v = (x.permute(0, 2, 1, 3).repeat_interleave(H // Hk, dim=1) for x in (k, v))
    if arith.reordered:
        s = arith.stored(q @ arith.stored(k * scale).transpose(-1, -2))
    else:
        s = arith.stored(q @ k.transpose(-1, -2)) * scale
    if score.softcap > 0:
        s = arith.stored(arith.stored(torch.tanh(arith.stored(s / score.softcap))) * score.softcap)

    def in_order(x: Tensor) -> Tensor:
        """(..., Sq, Sk) of a table over queries and keys."""
        return x.flip(-2, -1) if arith.reordered else x

    if score.alibi_slopes is not None:
        s = s + in_order(alibi_bias(score.alibi_slopes.to(arith.compute), B, Sq, Sk))
    if score.bias is not None:
        s = s + in_order(score.bias)
    mask = visible(Sq, Sk, score.causal, score.window, max_seqlen_k)[None, None]
    if score.mask is not None:
        mask = mask & score.mask
    if score.bias is not None:
        mask = mask & (score.bias > -math.inf)
    mask = in_order(mask)
    empty = ~mask.any(-1, keepdim=True)
    # A row without keys takes a softmax over its unmasked scores, which is finite, and is then replaced by zeros.
    s = s.masked_fill(empty, 0.0).masked_fill(~(mask | empty), -math.inf)
    if score.sink is not None:
        # One more key, which is all that a row without keys sees.
        s = s.masked_fill(empty, -math.inf)
        s = torch.cat((s, score.sink[None, :, None, None].expand(B, H, Sq, 1)), dim=-1)
        probs, lse = torch.softmax(s, dim=-1)[..., :-1], torch.logsumexp(s, dim=-1)
    elif Sk == 0:
        probs, lse = s, s.new_full((B, H, Sq), math.inf)
    else:
        probs = torch.softmax(s, dim=-1).masked_fill(empty, 0.0)
        lse = torch.logsumexp(s, dim=-1).masked_fill(empty[..., 0], math.inf)
    p = arith.stored(probs)
    if score.keep is not None:
        p = p.masked_fill(~in_order(score.keep), 0.0)
        v = arith.stored(v * (1.0 / (1.0 - score.dropout_p)))
    out = arith.stored(p @ v)
    return Result(out.permute(0, 2, 1, 3), lse, p.detach())


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Optional[Tensor],
    score: Score,
    arith: Arithmetic = EXACT,
    max_seqlen_k: Optional[int] = None,
    dlse: Optional[Tensor] = None,
) -> Result:
    """Forward and, where `dout` (B,Sq,H,Dv) is given, backward, from inputs of any dtype.

    dlse (B,H,Sq): gradient of the LSE; of rows whose LSE is infinite it is ignored.
    """

    def in_order(x: Tensor, *dims: int) -> Tensor:
        return x.flip(*dims) if arith.reordered else x

    extras = {name: x for name, x in (("bias", score.bias), ("sink", score.sink)) if x is not None}
    inputs = (q, k, v, *extras.values())
    leaves = [x.detach().to(arith.compute).requires_grad_(dout is not None) for x in inputs]

    def narrow(x: Tensor, like: Tensor) -> Tensor:
        """A table in fp32 keeps that dtype beside inputs of another, and so does its gradient."""
        own = torch.float32 if like.dtype == torch.float32 and arith.reordered else arith.storage
        return x.to(own).to(arith.compute)

    score = replace(score, **{name: narrow(x, extras[name]) for name, x in zip(extras, leaves[3:])})
    result = forward(*(arith.stored(in_order(x, 1, 3)) for x in leaves[:3]), score, arith, max_seqlen_k)
    result.out, result.lse = in_order(result.out, 1, 3), in_order(result.lse, 2)
    if dout is not None:
        outputs, weights = [result.out], [dout.to(arith.compute)]
        if dlse is not None:
            outputs.append(result.lse.masked_fill(torch.isinf(result.lse), 0.0))
            weights.append(dlse.to(arith.compute))
        # Where no row sees a key the LSE is a constant.
        moving = [n for n, x in enumerate(outputs) if x.requires_grad]
        result.grads = torch.autograd.grad([outputs[n] for n in moving], leaves, [weights[n] for n in moving])
    return Result(result.out.detach(), result.lse.detach(), in_order(result.probs, 2, 3), result.grads)


def run_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Optional[Tensor],
    lengths: List[Tuple[int, int]],
    score: Score,
    arith: Arithmetic = EXACT,
    max_seqlen_k: Optional[int] = None,
    dlse: Optional[Tensor] = None,
) -> Result:
    """The same on a packed batch: q (Tq,H,D), k (Tk,Hk,D), v (Tk,Hk,Dv); `lengths` are the (Sq, Sk) of each sequence.

    Rows past the last sequence give zeros, with an LSE of +inf. In `score` Sq and Sk are the longest here.
    """
    longest = max(Sk for _, Sk in lengths) if max_seqlen_k is None else max_seqlen_k
    Tq, H = q.shape[:2]
    out = torch.zeros(Tq, H, v.shape[-1], dtype=arith.compute)
    lse = torch.full((H, Tq), math.inf, dtype=arith.compute)
    inputs = [x for x in (q, k, v, score.bias, score.sink) if x is not None]
    grads = tuple(torch.zeros(x.shape, dtype=arith.compute) for x in inputs) if dout is not None else ()
    q0 = k0 = 0
    for b, (Sq, Sk) in enumerate(lengths):
        rows, keys = slice(q0, q0 + Sq), slice(k0, k0 + Sk)
        one = score
        if score.alibi_slopes is not None and score.alibi_slopes.dim() == 2:
            one = replace(one, alibi_slopes=score.alibi_slopes[b])
        if score.keep is not None:
            one = replace(one, keep=score.keep[b : b + 1, :, :Sq, :Sk])
        table = (slice(b, b + 1) if score.bias is not None and score.bias.shape[0] > 1 else slice(1),)
        table += (slice(None), slice(Sq), slice(Sk))
        if score.bias is not None:
            one = replace(one, bias=score.bias[table])
        if score.mask is not None:
            one = replace(one, mask=score.mask[b : b + 1] if score.mask.shape[0] > 1 else score.mask)
            one = replace(one, mask=one.mask[:, :, :Sq, :Sk])
        part = run(
            q[None, rows],
            k[None, keys],
            v[None, keys],
            None if dout is None else dout[None, rows],
            one,
            arith,
            longest,
            None if dlse is None else dlse[None, :, rows],
        )
        out[rows], lse[:, rows] = part.out[0], part.lse[0]
        for whole, piece, where in zip(grads, part.grads, (rows, keys, keys)):
            whole[where] = piece[0]
        for whole, piece, where in zip(grads[3:], part.grads[3:], [table] * (score.bias is not None) + [...]):
            whole[where] += piece
        q0, k0 = q0 + Sq, k0 + Sk
    return Result(out, lse, None, grads)
