"""Attention over a key/value cache: decoding, chunked prefill, paged serving."""

from __future__ import annotations

from typing import Optional, Union

import torch

from flash_attn._operators import Operator
from flash_attn._tensor_kinds import check_kinds

_attention_with_kvcache = Operator("attention_with_kvcache")


def lengths(cache_seqlens, q):
    """cache_seqlens as a tensor, one entry for each batch element of q; None stays."""
    if cache_seqlens is None or isinstance(cache_seqlens, torch.Tensor):
        return cache_seqlens
    return torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)


def check_caches(k_cache, v_cache):
    """Raises AssertionError, as upstream does, for a cache that would have to be copied."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        assert cache.stride(-1) == 1, (
            f"{name} must have a contiguous last dimension (stride 1), got strides {cache.stride()}; caches are "
            "written where they are and never copied, so make it contiguous before the call."
        )


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens: Optional[Union[int, torch.Tensor]] = None,
    cache_batch_idx: Optional[torch.Tensor] = None,
    cache_leftpad: Optional[torch.Tensor] = None,
    block_table: Optional[torch.Tensor] = None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    """Attention of q (B,Sq,H,D) over a cache, to which k and v are appended first: out (B,Sq,H,Dv). No gradient.

    k_cache, v_cache: (B_cache,S,Hk,D) and (B_cache,S,Hk,Dv), or pages (num_pages,page,Hk,D), (num_pages,page,Hk,Dv) of
        any size with block_table. Any strides with last stride 1; read and written where they are, never copied. After
        an exception they hold what they held.
    k, v: (B,Snew,Hk,D) and (B,Snew,Hk,Dv) or neither: written to slots cache_seqlens[b] .. cache_seqlens[b] + Snew - 1.
    rotary_cos, rotary_sin: (positions,R/2), dtype of q, with k; at least as many positions as slots, R <= D even. The
        first R features of k rotate by the key's slot before it is stored, those of a copy of q by cache_seqlens[b] + i
        for row i, or by cache_seqlens[b] for all rows without causal and window.
    cache_seqlens: int, or int32 (B): keys in the cache before appending. None: all slots.
    cache_batch_idx: int32 (B): the row of the cache that belongs to b; not with block_table. Of equal slots of several
        b that are appended to, the last b's keys stay.
    cache_leftpad: int32 (B): slots before the first key. Queries see slots cache_leftpad[b] .. cache_seqlens[b] + Snew
        - 1, and their number is Sk for causal, window and ALiBi.
    block_table: int32 (B,max_pages): slot s of b is slot s % page of page block_table[b, s // page]. Entries that no
        key needs may hold anything; the others are checked before anything is written.
    rotary_interleaved: True rotates features (0,1), (2,3), ... together; False i and i + R/2.
    num_splits: 0 to 128, in how many ranges keys may be taken, 0 for the backend's choice; never changes what is
        computed.
    The other arguments: see `flash_attn_func`.

    Returns out or, with return_softmax_lse, (out, softmax_lse (B,H,Sq)).
    Raises AssertionError for a cache whose last stride is not 1, RuntimeError for other malformed input.
    """
    check_kinds(("q", "k_cache", "v_cache"), (q, k_cache, v_cache))
    check_caches(k_cache, v_cache)
    out, softmax_lse = _attention_with_kvcache.call(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos,
        rotary_sin,
        lengths(cache_seqlens, q),
        cache_batch_idx,
        cache_leftpad,
        block_table,
        softmax_scale,
        causal,
        window_size,
        softcap,
        rotary_interleaved,
        alibi_slopes,
        num_splits,
    )
    return (out, softmax_lse) if return_softmax_lse else out
