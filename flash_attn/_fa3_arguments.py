"""What the arguments of FlashAttention-3 that FlashAttention-2 lacks mean in terms of `flash_attn`'s own functions."""

from __future__ import annotations

import math

import torch

from flash_attn import _native

MAX_HEAD_DIM = 576
MAX_SPLITS = 256  # what FlashAttention-3 takes
_MAX_SPLITS_OF_OPERATORS = 128
_INT32_MAX = 2**31 - 1


def check_no_fp8(q, **descales):
    """Raises NotImplementedError for what only fp8 attention has."""
    for name, descale in descales.items():
        if descale is not None:
            raise NotImplementedError(f"{name} was given; there is no fp8 attention yet: pass None and no fp8 tensors.")
    if "float8" in str(q.dtype):
        raise NotImplementedError(f"q is {q.dtype}; fp8 attention is not there yet: pass fp16, bf16 or fp32.")


def check_hints(num_splits, pack_gqa, sm_margin):
    """Raises RuntimeError for a hint that is out of range. Returns num_splits as the operators take it."""
    if not _is_count(num_splits) or num_splits > MAX_SPLITS:
        raise RuntimeError(f"num_splits is {num_splits!r}; it must be an int from 0 (chosen here) to {MAX_SPLITS}.")
    if pack_gqa is not None and not isinstance(pack_gqa, bool):
        raise RuntimeError(f"pack_gqa is {pack_gqa!r}; it must be True, False or None (chosen here).")
    if not _is_count(sm_margin):
        raise RuntimeError(f"sm_margin is {sm_margin!r}; it must be an int, 0 or more: compute units to leave idle.")
    return min(num_splits, _MAX_SPLITS_OF_OPERATORS)


def check_chunk(attention_chunk):
    """Raises RuntimeError unless attention_chunk is a length, or 0 for none."""
    if not _is_count(attention_chunk):
        raise RuntimeError(f"attention_chunk is {attention_chunk!r}; it must be an int, the length of a chunk, or 0.")


def _is_count(value):
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def with_qv(q, k, v, qv):
    """(q', k') of which the scores are q.k + qv.v: q' = (q, qv) and k' = (k, v), D + Dv features each."""
    if qv is None:
        return q, k
    D, Dv = q.shape[-1], v.shape[-1]
    if qv.shape != (*q.shape[:-1], Dv):
        raise RuntimeError(f"qv has shape {tuple(qv.shape)}; it must be q's with the Dv of v: {(*q.shape[:-1], Dv)}.")
    if k.shape[:-1] != v.shape[:-1]:
        raise RuntimeError(f"v has shape {tuple(v.shape)}; with qv it must be k's, {tuple(k.shape)}, up to Dv.")
    for name, tensor in (("qv", qv), ("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise RuntimeError(f"{name} is {tensor.dtype}; with qv it must have the dtype of q, {q.dtype}.")
    if D + Dv > MAX_HEAD_DIM:
        raise RuntimeError(f"qv needs D + Dv <= {MAX_HEAD_DIM}, got D = {D} and Dv = {Dv}.")
    return torch.cat((q, qv), dim=-1), torch.cat((k, v), dim=-1)


def chunk_bounds(positions, attention_chunk):
    """key_begin and key_end, int32, of rows whose diagonal is at key `positions` (i + Sk - Sq): that key's chunk."""
    begin = torch.div(positions, attention_chunk, rounding_mode="floor") * attention_chunk
    return begin.clamp(0, _INT32_MAX).int(), (begin + attention_chunk).clamp(0, _INT32_MAX).int()


def dense_chunk_bounds(q, Sk, attention_chunk):
    """{key_begin, key_end} (1,Sq) for q (B,Sq,H,D) and Sk keys; {} without chunks, or for what no call accepts."""
    if attention_chunk == 0 or q.dim() != 4:
        return {}
    Sq = q.shape[1]
    begin, end = chunk_bounds(torch.arange(Sq, device=q.device)[None] + (Sk - Sq), attention_chunk)
    return {"key_begin": begin, "key_end": end}


def sequence_of_rows(cu_seqlens, T):
    """int64 (T): the sequence of each of T packed rows; of rows behind the last sequence, the last one."""
    rows = torch.arange(T, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), rows, right=True).clamp(max=cu_seqlens.shape[0] - 2)


def packed_chunk_bounds(cu_seqlens_q, Tq, keys, attention_chunk):
    """{key_begin, key_end} (Tq); keys (B): each sequence's Sk. {} without chunks, or for what no call accepts."""
    if attention_chunk == 0 or cu_seqlens_q.dim() != 1 or keys.shape != (cu_seqlens_q.shape[0] - 1,) or len(keys) == 0:
        return {}
    b = sequence_of_rows(cu_seqlens_q, Tq)
    rows = torch.arange(Tq, device=cu_seqlens_q.device)
    begin, end = chunk_bounds(rows - cu_seqlens_q[b] + keys[b] - cu_seqlens_q.diff()[b], attention_chunk)
    return {"key_begin": begin, "key_end": end}


def cumulative(lengths):
    """int32 (B+1), from 0, of lengths (B)."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def check_per_sequence(name, value, B):
    if not isinstance(value, torch.Tensor):
        raise RuntimeError(f"{name} is {value!r}; it must be a tensor, int32 (B,) = ({B},).")
    if value.dtype != torch.int32 or value.shape != (B,):
        raise RuntimeError(f"{name} is {value.dtype} {tuple(value.shape)}; it must be int32 (B,) = ({B},).")
    return value


def check_dims_of_caches(**caches):
    for name, cache in caches.items():
        if cache.dim() != 4:
            raise RuntimeError(f"{name} has shape {tuple(cache.shape)}; it must be (B,S,Hk,D), or pages of that shape.")
        if cache.shape[1] == 0:
            raise RuntimeError(
                f"{name} has shape {tuple(cache.shape)}; with attention_chunk, qv, cu_seqlens_q, cu_seqlens_k_new or "
                "rotary_seqlens it must have at least one slot."
            )


def used_rows_first(name, used, cu_seqlens, T):
    """(order int64 (T), cu_seqlens int32 (B+1)) of T packed rows after those past the first used[b] move to the end."""
    # The kernels get other cu_seqlens, and max_seqlen is about used rows.
    if cu_seqlens.device.type == "cpu":
        _native.load()._check_lengths(cu_seqlens, name == "seqused_q", T, _INT32_MAX)
    lengths = cu_seqlens.diff()
    if used.dtype != torch.int32 or used.shape != lengths.shape:
        raise RuntimeError(f"{name} is {used.dtype} {tuple(used.shape)}; it must be int32 {tuple(lengths.shape)}.")
    if used.device.type == "cpu" and bool(((used < 0) | (used > lengths)).any()):
        raise RuntimeError(f"{name} is {used.tolist()}; they must be from 0 to {lengths.tolist()}, the rows.")
    used = torch.minimum(used.clamp(min=0), lengths)
    b = sequence_of_rows(cu_seqlens, T)
    unused = torch.arange(T, device=used.device) - cu_seqlens[b] >= used[b]
    return unused.int().sort(stable=True).indices, cumulative(used)


def upstream_lse(softmax_lse, Sk):
    """softmax_lse with -inf for rows that see no key; where a call has no keys at all, Sk = 0, with +inf."""
    return softmax_lse if Sk == 0 else softmax_lse.masked_fill(softmax_lse == math.inf, -math.inf)
