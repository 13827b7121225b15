"""What a call costs beside its arithmetic: one query of one head over a few keys, through Python."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from reference import deviation
from rows import Calls, Row
from uneven_suite import random_tensors, rotate_in_torch

import flash_attn
from flash_attn.layers.rotary import apply_rotary_emb

D = 16
KEYS = 8
KINDS = ("forward", "after-long", "with-graph", "forward+backward", "varlen", "cache", "append", "rotary")


def attention_pair(kind, q, k, v):
    """Our call of q (1, 1, 1, D) over k and v (1, KEYS, 1, D), and torch's."""
    of_torch = [x.detach().transpose(1, 2).contiguous() for x in (q, k, v)]
    if kind == "varlen":
        ends = [torch.tensor([0, length], dtype=torch.int32) for length in (1, KEYS)]
        rows = [x[0] for x in (q, k, v)]
        return partial(flash_attn.flash_attn_varlen_func, *rows, *ends, 1, KEYS), partial(
            F.scaled_dot_product_attention, *of_torch
        )
    if kind in ("forward", "after-long"):
        return partial(flash_attn.flash_attn_func, q, k, v), partial(F.scaled_dot_product_attention, *of_torch)
    ours, theirs = ([x.detach().requires_grad_() for x in tensors] for tensors in ((q, k, v), of_torch))
    if kind == "with-graph":
        return partial(flash_attn.flash_attn_func, *ours), partial(F.scaled_dot_product_attention, *theirs)
    return tuple(
        lambda f=f, x=x: torch.autograd.grad(f(*x), x, torch.ones_like(x[0]))
        for f, x in ((flash_attn.flash_attn_func, ours), (F.scaled_dot_product_attention, theirs))
    )


def cache_pair(kind, q, k, v):
    """The same from a cache with room for more, to which the last key is appended first if kind says so."""
    k_cache, v_cache = (x.repeat(1, 2, 1, 1) for x in (k, v))
    mine, other = (k_cache, v_cache), [x.transpose(1, 2).contiguous() for x in (k_cache, v_cache)]
    new = (k[:, -1:], v[:, -1:]) if kind == "append" else (None, None)
    lengths = torch.full((1,), KEYS - (kind == "append"), dtype=torch.int32)
    q_of_torch = q.transpose(1, 2)

    def theirs():
        if kind == "append":
            for cache, x in zip(other, new):
                cache[:, :, KEYS - 1 : KEYS] = x
        return F.scaled_dot_product_attention(q_of_torch, *(x[:, :, :KEYS] for x in other))

    return lambda: flash_attn.flash_attn_with_kvcache(q, *mine, *new, cache_seqlens=lengths), theirs


def long_call(dtype):
    """A call that leaves nothing in the caches of what others are made of."""
    return partial(flash_attn.flash_attn_func, *random_tensors(dtype, *3 * [(1, 2048, 8, 64)]))


def calls_of(dtype, kind):
    q, k, v = random_tensors(dtype, *((1, S, 1, D) for S in (1, KEYS, KEYS)))
    if kind == "rotary":
        tables = k[0, :, 0].chunk(2, -1)
        ours, theirs = partial(apply_rotary_emb, q, *tables), partial(rotate_in_torch, q, *(x[:1] for x in tables))
    else:
        ours, theirs = (cache_pair if kind in ("cache", "append") else attention_pair)(kind, q, k, v)

    def check():
        results = [x if isinstance(x, tuple) else (x,) for x in (ours(), theirs())]
        return deviation(*([x.detach().flatten() for x in result] for result in results))

    return Calls(ours, theirs, before=long_call(dtype) if kind == "after-long" else None, check=check)


def calls_rows(options):
    """For the record, without a bound."""
    setting = {"B": 1, "Sq": 1, "S": KEYS, "H": 1, "D": D}
    return [
        Row("calls", f"calls {dtype} {kind}", dtype, partial(calls_of, dtype, kind), setting=setting)
        for dtype in options.dtypes
        for kind in KINDS
    ]
