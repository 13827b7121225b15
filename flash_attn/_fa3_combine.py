"""Joins attention over parts of the keys (the online softmax of Milakov and Gimelshein 2018)."""

from __future__ import annotations

import math

import torch

from flash_attn._fa3_arguments import MAX_SPLITS

_OUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _check(out_partial, lse_partial, out, out_dtype):
    if out_partial.dim() != 5 or not 1 <= out_partial.shape[0] <= MAX_SPLITS:
        raise RuntimeError(
            f"out_partial has shape {tuple(out_partial.shape)}; it must be (splits,B,S,H,D), 1 to {MAX_SPLITS} splits."
        )
    if lse_partial.shape != out_partial.shape[:-1]:
        raise RuntimeError(
            f"lse_partial has shape {tuple(lse_partial.shape)}; it must be out_partial's (splits,B,S,H), "
            f"{tuple(out_partial.shape[:-1])}."
        )
    for name, tensor in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        if tensor.dtype != torch.float32:
            raise RuntimeError(f"{name} is {tensor.dtype}; it must be float32.")
    if out_dtype is not None and out_dtype not in _OUT_DTYPES:
        raise RuntimeError(f"out_dtype is {out_dtype}; it must be float32, float16 or bfloat16.")
    if out is None:
        return
    if out.shape != out_partial.shape[1:] or out.dtype not in _OUT_DTYPES:
        raise RuntimeError(
            f"out is {out.dtype} {tuple(out.shape)}; it must be (B,S,H,D) = {tuple(out_partial.shape[1:])} of float32, "
            "float16 or bfloat16."
        )
    if out_dtype not in (None, out.dtype):
        raise RuntimeError(f"out_dtype is {out_dtype} and out is {out.dtype}; pass one of them, or equal ones.")


@torch.no_grad()
def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """Attention over all keys from that over parts of them: (out (B,S,H,D), softmax_lse (B,S,H) fp32). No gradient.

    out_partial: fp32 (splits,B,S,H,D), each normalised over its own keys; 1 to 256 splits.
    lse_partial: fp32 (splits,B,S,H), their softmax_lse, any strides. Infinite where a part has no key: -inf, or +inf as
        `flash_attn` writes it; such a part counts for nothing. Without any, out is 0 and softmax_lse -inf.
    out: written to, where given. out_dtype: fp32 (None), fp16 or bf16; that of `out` where given.

    softmax_lse is stored as (B,H,S). Plain torch, on any device; raises RuntimeError for malformed input.
    """
    _check(out_partial, lse_partial, out, out_dtype)
    lse_partial = lse_partial.masked_fill(lse_partial == math.inf, -math.inf)
    lse = torch.logsumexp(lse_partial, dim=0)
    # Where no part has a key any finite number will do: all weights are then exp(-inf).
    weights = torch.exp(lse_partial - lse.masked_fill(lse == -math.inf, 0.0))
    seen = weights.unsqueeze(-1) > 0  # A part without keys may hold anything.
    combined = (out_partial.masked_fill(~seen, 0.0) * weights.unsqueeze(-1)).sum(0)
    if out is None:
        out = combined.to(out_dtype or torch.float32)
    else:
        out.copy_(combined)
    return out, lse.transpose(1, 2).contiguous().transpose(1, 2)
