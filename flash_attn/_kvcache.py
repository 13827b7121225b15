"""Attention over a key/value cache: decoding, chunked prefill, paged serving."""

from __future__ import annotations

from typing import Optional, Union

import torch

from flash_attn._operators import Operator, is_compiling
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


# ---- Where torch compiles. Inductor 2.13 hands a view with a symbolic storage offset to an operator that may write to
# it as if the offset were 0. Then torch itself writes the new keys, between an operator that checks the call and one
# that only reads the caches. Inductor copies the whole cache for that, so other offsets are left to the one operator.


def _append_plan(
    q, k_cache, v_cache, k, v, cos, sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table, *rest
):
    """What `append_plan` computes, after the checks of the call that would write by itself, with their words."""
    from flash_attn import _explain  # which imports this module

    *score, interleaved, slopes, num_splits = rest
    storage = (cos, sin, cache_batch_idx, cache_leftpad, block_table, slopes, None)
    check = _explain._explainers()[1]
    check(q, k_cache, v_cache, k, v, cache_seqlens, *storage, *score, interleaved, num_splits)
    B, Snew = q.shape[0], 0 if k is None else k.shape[1]
    if cache_seqlens is None:
        slots = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
        cache_seqlens = torch.full((B,), slots, dtype=torch.int32, device=q.device)
    slot = (cache_seqlens[:, None] + torch.arange(Snew, device=q.device)).long()
    if block_table is None:
        pages = torch.arange(B, device=q.device) if cache_batch_idx is None else cache_batch_idx.long()
        page = pages[:, None].expand(B, Snew)
    else:
        page = block_table.gather(1, torch.div(slot, k_cache.shape[1], rounding_mode="floor")).long()
        slot = slot % k_cache.shape[1]
    page, slot = page.flatten(), slot.flatten()
    # Rows that share a slot all take the last one's keys: then no order of writing makes a difference.
    place = page * k_cache.shape[1] + slot
    ordered, order = place.sort(stable=True)
    row = order[torch.searchsorted(ordered, place, right=True) - 1]
    return cache_seqlens + Snew, page.clone(), slot.clone(), row


def _append_plan_meta(q, k_cache, v_cache, k, *rest):
    rows = 0 if k is None or k.dim() < 2 else q.shape[0] * k.shape[1]
    lengths = torch.empty(q.shape[0], dtype=torch.int32, device=q.device)
    return (lengths, *(torch.empty(rows, dtype=torch.int64, device=q.device) for _ in range(3)))


def _rotate(x, rows_apart, cos, sin, positions, interleaved):
    """x (B,S,heads,D), row i of sequence b rotated to positions[b] + i, or to positions[b] without rows_apart."""
    rows = x if rows_apart else x.reshape(x.shape[0], 1, -1, x.shape[3])
    return torch.ops.flash_attn.rotate.default(rows, cos, sin, 0, positions, None, interleaved, False).view(x.shape)


def _is_symbolic(number):
    return isinstance(number, torch.SymInt) and number.node.maybe_as_int() is None


@torch.no_grad()
def _traced(q, k_cache, v_cache, k, v, cos, sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table,
            scale, causal, left, right, softcap, interleaved, alibi_slopes, num_splits):  # fmt: skip
    """`attention_with_kvcache`, at a symbolic offset as attention of a packed batch over pages: a cache without pages
    has one of S slots for each sequence."""
    options = (scale, causal, left, right, softcap, interleaved, alibi_slopes, num_splits)
    call = (q, k_cache, v_cache, k, v, cos, sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table, *options)
    # A cache without slots can be no page, and nothing is written to it.
    malformed_or_empty = not q.dim() == k_cache.dim() == v_cache.dim() == 4 or k_cache.shape[1] == 0
    if malformed_or_empty or not any(_is_symbolic(x.storage_offset()) for x in (k_cache, v_cache)):
        return torch.ops.flash_attn.attention_with_kvcache.default(*call)
    lengths, page, slot, row = torch.ops.flash_attn.append_plan.default(*call)
    B, Sq = q.shape[:2]
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    if k is not None and v is not None:
        if cos is not None and sin is not None:
            rows_apart = causal or any(0 <= w < capacity for w in (left, right))
            q = _rotate(q, rows_apart, cos, sin, cache_seqlens, interleaved)
            k = _rotate(k, True, cos, sin, cache_seqlens, interleaved)
        k_cache.index_put_((page, slot), k.flatten(0, 1)[row])
        v_cache.index_put_((page, slot), v.flatten(0, 1)[row])
    pages = block_table
    if pages is None:
        one_each = torch.arange(B, dtype=torch.int32, device=q.device)
        pages = (one_each if cache_batch_idx is None else cache_batch_idx)[:, None]
    # cu_seqlens_k says nothing beside lengths and pages.
    cu_seqlens = torch.arange(B + 1, dtype=torch.int32, device=q.device) * Sq
    score = (0.0, scale, causal, left, right, softcap, alibi_slopes, False, True)
    storage = (pages, cache_leftpad, lengths, num_splits)
    out, softmax_lse, _ = torch.ops.flash_attn.attention.default(
        q.flatten(0, 1), k_cache, v_cache, cu_seqlens, cu_seqlens, Sq, capacity, *score, *(None,) * 5, *storage
    )
    return out.unflatten(0, (B, Sq)), softmax_lse.unflatten(1, (B, Sq)).transpose(0, 1).contiguous()


def _define_traced_operators():
    """flash_attn::attention_with_kvcache_traced, `attention_with_kvcache` as compilers take it, and for it
    flash_attn::append_plan: (keys of each sequence afterwards int32 (B), and of each of the B*Snew new keys its page of
    the cache, its slot there and the row whose keys that slot gets). It takes the same arguments and writes nothing."""
    library = torch.library.Library("flash_attn", "FRAGMENT")
    schema = str(torch.ops.flash_attn.attention_with_kvcache.default._schema).split("(", 1)[1]
    library.define(f"attention_with_kvcache_traced({schema}")
    library.impl("attention_with_kvcache_traced", _traced, "CompositeImplicitAutograd")
    arguments = schema.split(" -> ")[0].replace("(a!)", "").replace("(b!)", "")
    library.define(f"append_plan({arguments} -> (Tensor lengths, Tensor page, Tensor slot, Tensor row)")
    library.impl("append_plan", _append_plan, "CompositeExplicitAutograd")
    library.impl("append_plan", _append_plan_meta, "Meta")
    return library


# Before torch 2.1 nothing tells that torch compiles.
_library = _define_traced_operators() if hasattr(torch, "compiler") else None
_attention_traced = Operator("attention_with_kvcache_traced") if _library is not None else None


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
        b that are appended to, the last b's keys stay on the CPU; on a GPU it is open whose do, for k and v apart.
    cache_leftpad: int32 (B): slots before the first key. Queries see slots cache_leftpad[b] .. cache_seqlens[b] + Snew
        - 1, and their number is Sk for causal, window and ALiBi.
    block_table: int32 (B,max_pages): slot s of b is slot s % page of page block_table[b, s // page]. Entries that no
        key needs may hold anything; the others are checked on the CPU before anything is written. On a GPU nothing
        outside of the caches is reached, whatever they and cache_seqlens say.
    rotary_interleaved: True rotates features (0,1), (2,3), ... together; False i and i + R/2.
    num_splits: 0 to 128, in how many ranges keys may be taken, 0 for the backend's choice; never changes what is
        computed. Above 1 the native kernels of GPUs raise NotImplementedError.
    The other arguments: see `flash_attn_func`.

    Returns out or, with return_softmax_lse, (out, softmax_lse (B,H,Sq)).
    Raises AssertionError for a cache whose last stride is not 1, RuntimeError for other malformed input.
    """
    check_kinds(("q", "k_cache", "v_cache"), (q, k_cache, v_cache))
    check_caches(k_cache, v_cache)
    attend = _attention_traced.general if is_compiling() else _attention_with_kvcache.call
    out, softmax_lse = attend(
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
