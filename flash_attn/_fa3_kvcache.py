"""FlashAttention-3's attention over a key/value cache. What FlashAttention-2's has goes to `flash_attn`'s own function.

The rest, ragged queries and new keys, chunks, qv and rotary_seqlens, is attention of a packed batch over pages: a cache
without pages is one of pages of S slots, of which sequence b has page cache_batch_idx[b].
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple, Optional, Union

import torch
from torch import Tensor

from flash_attn import _attention, _kvcache, _operators
from flash_attn import _fa3_arguments as arguments
from flash_attn._tensor_kinds import check_kinds
from flash_attn.layers.rotary import apply_rotary_emb


class _Rows(NamedTuple):
    """Rows of a batch, packed: x (T,heads,features), cu_seqlens int32 (B+1), and of each row its sequence and index."""

    x: Tensor
    cu_seqlens: Tensor
    sequence: Tensor
    index: Tensor


class _Lengths(NamedTuple):
    """Where keys, rows and positions of a call begin and end, by its arguments' names."""

    cache_seqlens: Optional[Union[int, Tensor]]
    cache_batch_idx: Optional[Tensor]
    cache_leftpad: Optional[Tensor]
    page_table: Optional[Tensor]
    cu_seqlens_q: Optional[Tensor]
    cu_seqlens_k_new: Optional[Tensor]
    max_seqlen_q: Optional[int]
    rotary_seqlens: Optional[Tensor]


def _packed(name, x, cu_seqlens):
    """x (B,S,heads,features), or (T,heads,features) with cu_seqlens, as `_Rows`."""
    dims = 4 if cu_seqlens is None else 3
    if x.dim() != dims:
        letters = "(B,S,heads,features)" if dims == 4 else "(T,heads,features), since it has cu_seqlens"
        raise RuntimeError(f"{name} has shape {tuple(x.shape)}; it must be {letters}.")
    if cu_seqlens is None:
        cu_seqlens = torch.arange(x.shape[0] + 1, dtype=torch.int32, device=x.device) * x.shape[1]
        x = x.flatten(0, 1)
    elif cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1:
        raise RuntimeError(
            f"cu_seqlens of {name} is {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}; it must be int32 (B+1)."
        )
    elif cu_seqlens[0] != 0 or cu_seqlens[-1] != x.shape[0] or (cu_seqlens.diff() < 0).any():
        raise RuntimeError(
            f"cu_seqlens of {name} is {cu_seqlens.tolist()}; it must rise from 0 to its {x.shape[0]} rows."
        )
    sequence = arguments.sequence_of_rows(cu_seqlens, x.shape[0])
    return _Rows(x, cu_seqlens, sequence, torch.arange(x.shape[0], device=x.device) - cu_seqlens[sequence])


def _per_sequence(name, value, B, device, default=None):
    """int32 (B) of an int, a tensor, or None for the default."""
    value = default if value is None else value
    if not isinstance(value, Tensor):
        return torch.full((B,), value, dtype=torch.int32, device=device)
    return arguments.check_per_sequence(name, value, B)


def _starts(cache_seqlens, k, B, device, capacity):
    """int32 (B): keys of each sequence before k is appended."""
    if k is not None and cache_seqlens is None:
        raise RuntimeError("cache_seqlens is missing; it says where k and v are appended: pass an int, or int32 (B,).")
    starts = _per_sequence("cache_seqlens", cache_seqlens, B, device, capacity)
    readable = starts.device.type == "cpu"
    if k is None and readable and ((starts < 0) | (starts > capacity)).any():
        raise RuntimeError(f"cache_seqlens is {starts.tolist()}; it must be from 0 to {capacity}, a sequence's slots.")
    return starts


def _pages(k_cache, page_table, cache_batch_idx, B):
    """int32 (B,max_pages): the pages of each sequence."""
    if page_table is None:
        if cache_batch_idx is None and k_cache.shape[0] != B:
            raise RuntimeError(
                f"k_cache has {k_cache.shape[0]} sequences and q {B}; pass cache_batch_idx, or equal ones."
            )
        default = torch.arange(B, dtype=torch.int32, device=k_cache.device)
        return _per_sequence("cache_batch_idx", cache_batch_idx, B, k_cache.device, default)[:, None]
    if cache_batch_idx is not None:
        raise RuntimeError("page_table and cache_batch_idx were both given; pass cache_batch_idx=None.")
    if page_table.dtype != torch.int32 or page_table.dim() != 2 or page_table.shape[0] != B:
        raise RuntimeError(
            f"page_table is {page_table.dtype} {tuple(page_table.shape)}; it must be int32 (B,max_pages), B = {B}."
        )
    return page_table


def _slots(k_cache, pages, starts, new):
    """(page, slot in the page) of each new key; RuntimeError where the cache has none."""
    page_size, capacity = k_cache.shape[1], pages.shape[1] * k_cache.shape[1]
    slots = starts[new.sequence] + new.index
    if ((slots < 0) | (slots >= capacity)).any():
        raise RuntimeError(
            f"cache_seqlens {starts.tolist()} and new keys {new.cu_seqlens.diff().tolist()} do not fit into the "
            f"{capacity} slots of a sequence (k_cache, page_table); give it more pages or a longer cache."
        )
    page = pages[new.sequence, torch.div(slots, page_size, rounding_mode="floor").long()].long()
    if ((page < 0) | (page >= k_cache.shape[0])).any():
        raise RuntimeError(
            f"new keys go to pages {page.tolist()} (page_table, cache_batch_idx); they must be from 0 to "
            f"{k_cache.shape[0] - 1}, the pages of k_cache."
        )
    return page, (slots % page_size).long()


def _rotated(rows, tables, positions, interleaved):
    """x of the rows with the first features of row t rotated to position positions[t]."""
    cos, sin = tables
    if (positions < 0).any() or (positions >= cos.shape[0]).any():
        raise RuntimeError(
            f"rotary_cos has {cos.shape[0]} positions; rows are at {positions.tolist()}: make both tables longer."
        )
    return apply_rotary_emb(rows.x[:, None], cos, sin, interleaved, seqlen_offsets=positions.int())[:, 0]


def _rotate(q, new, rotary, positions, per_row, interleaved):
    """(x of q, x of new) rotated; positions int32 (B): of each sequence's first row and first new key."""
    if all(table is None for table in rotary):
        return q.x, None if new is None else new.x
    if any(table is None for table in rotary) or new is None:
        raise RuntimeError(
            "rotary_cos, rotary_sin, k and v come together; not all of them were given: pass the others "
            "too, or neither table."
        )
    D, dtype = q.x.shape[-1], q.x.dtype
    for name, table in zip(("rotary_cos", "rotary_sin"), rotary):
        if table.dim() != 2 or 2 * table.shape[1] > D or table.dtype != dtype:
            shape = tuple(table.shape)
            raise RuntimeError(f"{name} is {table.dtype} {shape}; it must be {dtype} (positions,R/2) with R <= {D}.")
    starts = positions[q.sequence]
    queries = _rotated(q, rotary, starts + q.index if per_row else starts, interleaved)
    return queries, _rotated(new, rotary, positions[new.sequence] + new.index, interleaved)


def _check_new(k, v, k_cache, v_cache):
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if new.dtype != cache.dtype or new.shape[-2:] != cache.shape[-2:]:
            raise RuntimeError(
                f"{name} is {new.dtype} {tuple(new.shape)}; it must have dtype, heads and features of {name}_cache, "
                f"{cache.dtype} {tuple(cache.shape)}."
            )
    if k.shape[:-1] != v.shape[:-1]:
        raise RuntimeError(f"k and v have shapes {tuple(k.shape)} and {tuple(v.shape)}; they must have the same rows.")


class _Append:
    """Writes new rows to caches; where attention then raises, puts back what was there."""

    def __init__(self, caches, rows, where):
        self.caches, self.rows, self.where = caches, rows, where

    def __enter__(self):
        self.before = [cache[self.where] for cache in self.caches]
        self._write(self.rows)

    def __exit__(self, kind, error, traceback):
        if kind is not None:
            self._write(self.before)

    def _write(self, rows):
        for cache, row in zip(self.caches, rows):
            cache[self.where] = row


def _with_new_keys(q, caches, k, v, cu_seqlens_k_new, rotary, positions, per_row, interleaved, starts, pages):
    """(queries, lengths (B), what to append) of a call with or without new keys."""
    if k is None and v is None:
        queries, _ = _rotate(q, None, rotary, positions, per_row, interleaved)
        return queries, starts, contextlib.nullcontext()
    if k is None or v is None:
        raise RuntimeError(f"k and v come together, got only {'v' if k is None else 'k'}; pass both, or neither.")
    _check_new(k, v, *caches)
    new = _packed("k", k, cu_seqlens_k_new)
    if new.cu_seqlens.shape != q.cu_seqlens.shape:
        raise RuntimeError(
            f"k has {new.cu_seqlens.shape[0] - 1} sequences, q {q.cu_seqlens.shape[0] - 1}; both must have as many."
        )
    queries, keys = _rotate(q, new, rotary, positions, per_row, interleaved)
    values = v if cu_seqlens_k_new is not None else v.flatten(0, 1)
    append = _Append(caches, (keys, values), _slots(caches[0], pages, starts, new))
    return queries, starts + new.cu_seqlens.diff(), append


def _attend_over_pages(q, caches, k, v, qv, rotary, call, mask, attention_chunk, interleaved, options):
    """(out, softmax_lse) of `flash_attn_with_kvcache`, by attention of a packed batch. mask: causal and window_size."""
    k_cache, v_cache = caches
    packed = _packed("q", q, call.cu_seqlens_q)
    B, device = packed.cu_seqlens.shape[0] - 1, q.device
    pages = _pages(k_cache, call.page_table, call.cache_batch_idx, B)
    capacity = pages.shape[1] * k_cache.shape[1]
    starts = _starts(call.cache_seqlens, k, B, device, capacity)
    positions = _per_sequence("rotary_seqlens", call.rotary_seqlens, B, device, starts)
    leftpad = call.cache_leftpad
    if leftpad is not None:
        leftpad = _per_sequence("cache_leftpad", leftpad, B, device)
    if call.rotary_seqlens is not None and all(table is None for table in rotary):
        raise RuntimeError("rotary_seqlens was given without rotary_cos and rotary_sin; pass them, or None.")
    windows = _operators.window_bounds(mask["window_size"])
    per_row = mask["causal"] or attention_chunk > 0 or any(0 <= w < capacity for w in windows)
    queries, lengths, append = _with_new_keys(
        packed,
        caches,
        k,
        v,
        call.cu_seqlens_k_new,
        rotary,
        positions,
        per_row,
        interleaved,
        starts,
        pages,
    )
    ragged = call.cu_seqlens_q is not None
    max_seqlen_q = call.max_seqlen_q if ragged else q.shape[1]
    if max_seqlen_q is None:
        raise RuntimeError("max_seqlen_q is missing; cu_seqlens_q needs it: pass the longest sequence's length.")
    with append:
        if qv is not None:
            queries, k_cache = arguments.with_qv(queries, k_cache, v_cache, qv if ragged else qv.flatten(0, 1))
        seen = lengths if leftpad is None else lengths - leftpad
        out, softmax_lse, _ = _attention.flash_attn_varlen_func(
            queries,
            k_cache,
            v_cache,
            packed.cu_seqlens,
            arguments.cumulative(lengths),
            max_seqlen_q,
            capacity,
            **mask,
            return_attn_probs=True,
            block_table=pages,
            leftpad_k=leftpad,
            **arguments.packed_chunk_bounds(packed.cu_seqlens, queries.shape[0], seen, attention_chunk),
            **options,
        )
    if ragged:
        return out, softmax_lse
    return out.unflatten(0, (B, q.shape[1])), softmax_lse.unflatten(1, (B, q.shape[1])).transpose(0, 1)


def _check_lengths_of_rows(q, k, cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q):
    if cu_seqlens_k_new is not None and k is None:
        raise RuntimeError("cu_seqlens_k_new was given without k and v, whose rows it describes; pass them, or None.")
    if cu_seqlens_q is None and max_seqlen_q is not None and q.dim() == 4 and max_seqlen_q < q.shape[1]:
        raise RuntimeError(f"max_seqlen_q is {max_seqlen_q}; it must be at least q's rows, {q.shape[1]}, or None.")


def _check_metadata(scheduler_metadata, q):
    if scheduler_metadata is not None and (
        scheduler_metadata.dtype != torch.int32 or scheduler_metadata.device != q.device
    ):
        raise RuntimeError(
            f"scheduler_metadata is {scheduler_metadata.dtype} on {scheduler_metadata.device}; it must be int32 on "
            f"{q.device}, as get_scheduler_metadata returns it."
        )


@torch.no_grad()
def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens: Optional[Union[int, Tensor]] = None,
    cache_batch_idx: Optional[Tensor] = None,
    cache_leftpad: Optional[Tensor] = None,
    page_table: Optional[Tensor] = None,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k_new: Optional[Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    rotary_seqlens: Optional[Tensor] = None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
):
    """Attention of q (B,Sq,H,D) over a cache, to which k and v are appended first: out (B,Sq,H,Dv). No gradient.

    page_table is block_table of `flash_attn.flash_attn_with_kvcache`, which describes the cache, appending, rotation,
    cache_batch_idx, cache_leftpad and the other arguments that it has. After an exception caches hold what they held.

    cu_seqlens_q, max_seqlen_q: int32 (B+1), int: q is (Tq,H,D), packed, and so are out and qv.
    cu_seqlens_k_new: int32 (B+1): k and v are (T,Hk,D) and (T,Hk,Dv), packed: each sequence appends its own number.
    rotary_seqlens: int32 (B): positions start there and not at cache_seqlens.
    qv, attention_chunk, num_splits, pack_gqa, sm_margin, descales: see `flash_attn_func` of this module. qv copies the
        whole cache, once a call. For rotation a chunk is a window: each row has its own position.
    scheduler_metadata: what `get_scheduler_metadata` returns; a hint.

    Returns out or, with return_softmax_lse, (out, softmax_lse, out_accum, lse_accum): softmax_lse (B,H,Sq) or (H,Tq),
    -inf for rows that see no key, +inf for all where the cache has no slot; the last two, scratch of upstream's, hold
        nothing.
    """
    check_kinds(("q", "k_cache", "v_cache"), (q, k_cache, v_cache))
    arguments.check_no_fp8(q, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    num_splits = arguments.check_hints(num_splits, pack_gqa, sm_margin)
    arguments.check_chunk(attention_chunk)
    _check_metadata(scheduler_metadata, q)
    _check_lengths_of_rows(q, k, cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q)
    _kvcache.check_caches(k_cache, v_cache)
    mask = {"causal": causal, "window_size": window_size}
    options = {"softmax_scale": softmax_scale, "softcap": softcap, "num_splits": num_splits}
    caches, rotary = (k_cache, v_cache), (rotary_cos, rotary_sin)
    where = (cache_seqlens, cache_batch_idx, cache_leftpad, page_table)
    if attention_chunk or any(x is not None for x in (qv, cu_seqlens_q, cu_seqlens_k_new, rotary_seqlens)):
        arguments.check_dims_of_caches(k_cache=k_cache, v_cache=v_cache)
        call = _Lengths(*where, cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q, rotary_seqlens)
        out, softmax_lse = _attend_over_pages(
            q, caches, k, v, qv, rotary, call, mask, attention_chunk, rotary_interleaved, options
        )
    else:
        options.update(mask, rotary_interleaved=rotary_interleaved, return_softmax_lse=True)
        out, softmax_lse = _kvcache.flash_attn_with_kvcache(q, *caches, k, v, *rotary, *where, **options)
    if not return_softmax_lse:
        return out
    empty = torch.empty(0, dtype=torch.float32, device=q.device)
    return out, arguments.upstream_lse(softmax_lse, k_cache.shape[0] * k_cache.shape[1]), empty, empty.clone()


def get_scheduler_metadata(
    batch_size,
    max_seqlen_q,
    max_seqlen_k,
    num_heads_q,
    num_heads_kv,
    headdim,
    cache_seqlens: Tensor,
    qkv_dtype=torch.bfloat16,
    headdim_v=None,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k_new: Optional[Tensor] = None,
    cache_leftpad: Optional[Tensor] = None,
    page_size: Optional[int] = None,
    max_seqlen_k_new=0,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    has_softcap=False,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
):
    """int32 (1) holding 0, on the device of cache_seqlens, for scheduler_metadata of `flash_attn_with_kvcache`.

    Nothing here needs a plan made ahead, so this only checks the description of the call that comes: sizes, heads, head
    dims, cache_seqlens and other int32 tensors per sequence, and hints. Raises RuntimeError for what it cannot be.
    """
    arguments.check_hints(num_splits, pack_gqa, sm_margin)
    arguments.check_chunk(attention_chunk)
    _operators.window_bounds(window_size)
    if "float8" in str(qkv_dtype):
        raise NotImplementedError(f"qkv_dtype is {qkv_dtype}; fp8 attention is not there yet: pass fp16, bf16 or fp32.")
    sizes = {"batch_size": batch_size, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    for name, size in {**sizes, "max_seqlen_k_new": max_seqlen_k_new}.items():
        if size < 0:
            raise RuntimeError(f"{name} is {size}; it must not be negative.")
    if num_heads_kv < 1 or num_heads_q < 1 or num_heads_q % num_heads_kv:
        raise RuntimeError(f"num_heads_q is {num_heads_q}; it must be a multiple of num_heads_kv, {num_heads_kv}.")
    for name, width in (("headdim", headdim), ("headdim_v", headdim if headdim_v is None else headdim_v)):
        if not 1 <= width <= arguments.MAX_HEAD_DIM:
            raise RuntimeError(f"{name} is {width}; it must be from 1 to {arguments.MAX_HEAD_DIM}.")
    if page_size is not None and page_size < 1:
        raise RuntimeError(f"page_size is {page_size}; it must be 1 or more, or None.")
    tensors = {"cache_seqlens": (cache_seqlens, 0), "cache_leftpad": (cache_leftpad, 0)}
    tensors.update(cu_seqlens_q=(cu_seqlens_q, 1), cu_seqlens_k_new=(cu_seqlens_k_new, 1))
    for name, (tensor, more) in tensors.items():
        if tensor is not None or name == "cache_seqlens":
            arguments.check_per_sequence(name, tensor, batch_size + more)
    return torch.zeros(1, dtype=torch.int32, device=cache_seqlens.device)
