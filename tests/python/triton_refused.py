"""Calls that the Triton backend refuses, and the words that say why."""

from __future__ import annotations

import torch

from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.flash_attn_triton_amd import interface_fa


def refused(there):
    """Words of the message -> (exception, call). there: puts a tensor on the device."""
    q = there(torch.zeros(1, 4, 2, 16))
    wide = there(torch.zeros(1, 4, 2, 264))
    pages, table = there(torch.zeros(2, 16, 2, 16)), there(torch.zeros(1, 2, dtype=torch.int32))
    cu = there(torch.tensor([0, 4], dtype=torch.int32))
    raw = (q, q, q, None, None, 0.0, 1.0, False, -1, -1, 0.0, False)
    missing, bad = NotImplementedError, RuntimeError
    dense, cache = flash_attn_func, flash_attn_with_kvcache

    def paged(**options):
        return flash_attn_varlen_func(q[0], pages, pages, cu, cu, 4, 4, block_table=table, **options)

    mask = there(torch.ones(1, 4, dtype=torch.bool))
    rotary = there(torch.zeros(4, 8))
    return {
        "attn_bias": (missing, lambda: dense(q, q, q, attn_bias=there(torch.zeros(1, 1, 1, 4)))),
        "attn_mask": (missing, lambda: dense(q, q, q, attn_mask=mask)),
        "learnable_sink": (missing, lambda: dense(q, q, q, learnable_sink=there(torch.zeros(2)))),
        "key_begin": (missing, lambda: dense(q, q, q, key_begin=cu[:1].expand(1, 4))),
        "fp64": (missing, lambda: dense(q.double(), q.double(), q.double())),
        "head dim above 256": (missing, lambda: dense(wide, wide, wide)),
        "descale_q": (missing, lambda: interface_fa.fwd(*raw, None, rotary)),
        "dropout over stored keys": (missing, lambda: paged(dropout_p=0.1)),
        "`generator` argument": (bad, lambda: interface_fa.fwd(*raw, torch.Generator())),
        "return_softmax": (bad, lambda: interface_fa.fwd(*raw[:-1], True)),
        "softcap": (bad, lambda: dense(q, q, q, dropout_p=0.1, softcap=3.0)),
        "dropout_p": (bad, lambda: dense(q, q, q, dropout_p=1.0)),
        "k must be": (bad, lambda: dense(q, q.half(), q)),
        "v must have shape": (bad, lambda: dense(q, q, q[:, :2])),
        "divide": (bad, lambda: dense(q, q.repeat(1, 1, 3, 1)[:, :, :3], q.repeat(1, 1, 3, 1)[:, :, :3])),
        "alibi_slopes": (bad, lambda: dense(q, q, q, alibi_slopes=there(torch.zeros(3)))),
        "num_splits must be": (bad, lambda: cache(q, q, q, num_splits=129)),
        "num_splits > 1 is not supported": (
            bad,
            lambda: interface_fa.varlen_fwd(
                q[0], pages, pages, None, cu, cu, None, None, table, None, 4, 4, 0.0, 1.0, False, False, -1, -1, 0.0,
                False, None, 2,
            ),
        ),
        "k and v go together": (bad, lambda: cache(q, q, q, k=q, cache_seqlens=0)),
        "without cache_seqlens": (bad, lambda: cache(q, q, q, k=q, v=q)),
        "slots": (bad, lambda: cache(q, q.clone(), q.clone(), k=q, v=q, cache_seqlens=1)),
        "block_table": (bad, lambda: cache(q, pages, pages, q, q, cache_seqlens=30, block_table=table)),
        "do not go together": (bad, lambda: cache(q, pages, pages, cache_batch_idx=cu[:1], block_table=table)),
        "rotary_cos is given without k": (bad, lambda: cache(q, q, q, rotary_cos=rotary, rotary_sin=rotary)),
        "rotary_cos must be": (bad, lambda: cache(q, q.clone(), q.clone(), q, q, rotary.half(), rotary.half(), 0)),
    }  # fmt: skip
