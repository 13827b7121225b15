"""Upstream's five raw functions on the Triton backend, with the positional order of `flash_attn_2_cuda`.

Upstream's module of this name adds descale arguments, for fp8, which this backend does not have: not None raises
NotImplementedError. Letters and meanings: `flash_attn_func`, `flash_attn_with_kvcache`. CPU tensors go to the CPU
backend unless Triton's interpreter is on. No function records a gradient.
"""

from __future__ import annotations

from typing import List, Optional

from torch import Tensor

from flash_attn.flash_attn_triton_amd.raw import Problem, check, computes, elsewhere, refuse, run_backward, run_forward
from flash_attn.flash_attn_triton_amd.stored import StoredKeys, attend_cache, attend_pages


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Optional[Tensor],
    alibi_slopes: Optional[Tensor],
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    gen_=None,
    descale_q: Optional[Tensor] = None,
    descale_k: Optional[Tensor] = None,
    descale_v: Optional[Tensor] = None,
    descale_o: Optional[Tensor] = None,
) -> List[Tensor]:
    """q (B,Sq,H,D), k (B,Sk,Hk,D), v (B,Sk,Hk,Dv) -> [out, softmax_lse (B,H,Sq), S_dmask, rng_state]."""
    refuse(gen_, descale_q=descale_q, descale_k=descale_k, descale_v=descale_v, descale_o=descale_o)
    score = (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap)
    if not computes(q):
        return elsewhere("fwd", q, k, v, out, alibi_slopes, *score, return_softmax, None)
    return run_forward(Problem(q, k, v, *score, alibi_slopes), out, return_softmax)


def varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Optional[Tensor],
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Optional[Tensor],
    leftpad_k: Optional[Tensor],
    block_table_: Optional[Tensor],
    alibi_slopes: Optional[Tensor],
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    zero_tensors: bool,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    gen_=None,
    num_splits: int = 0,
    descale_q: Optional[Tensor] = None,
    descale_k: Optional[Tensor] = None,
    descale_v: Optional[Tensor] = None,
    descale_o: Optional[Tensor] = None,
) -> List[Tensor]:
    """q (Tq,H,D), k (Tk,Hk,D), v (Tk,Hk,Dv), or pages (num_pages,page,Hk,D) with block_table
    -> [out, softmax_lse (H,Tq), S_dmask, rng_state]. All of them are always written: zero_tensors asks for nothing."""
    # Upstream's function of that name has descale_q in the place of num_splits.
    descale_q, num_splits = (num_splits, 0) if isinstance(num_splits, Tensor) else (descale_q, num_splits)
    refuse(gen_, descale_q=descale_q, descale_k=descale_k, descale_v=descale_v, descale_o=descale_o)
    score = (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap)
    lengths = (cu_seqlens_q, cu_seqlens_k)
    longest = (max_seqlen_q, max_seqlen_k)
    if not computes(q):
        storage = (seqused_k, leftpad_k, block_table_, alibi_slopes)
        more = (*score[:2], zero_tensors, *score[2:], return_softmax, None, num_splits)
        return elsewhere("varlen_fwd", q, k, v, out, *lengths, *storage, *longest, *more)
    problem = Problem(q, k, v, *score, alibi_slopes, *lengths, *longest, seqused_k, leftpad_k)
    if block_table_ is not None:
        check(
            num_splits <= 1,
            f"num_splits > 1 is not supported with block_table, got num_splits = {num_splits}; pass 0 or 1",
        )
        return attend_pages(problem, block_table_, out, num_splits, return_softmax)
    return run_forward(problem, out, return_softmax)


def bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Optional[Tensor],
    dk: Optional[Tensor],
    dv: Optional[Tensor],
    alibi_slopes: Optional[Tensor],
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    gen_=None,
    rng_state: Optional[Tensor] = None,
    descale_q: Optional[Tensor] = None,
    descale_k: Optional[Tensor] = None,
    descale_v: Optional[Tensor] = None,
    descale_o: Optional[Tensor] = None,
    descale_do: Optional[Tensor] = None,
    descale_dq: Optional[Tensor] = None,
    descale_dk: Optional[Tensor] = None,
    descale_dv: Optional[Tensor] = None,
) -> List[Tensor]:
    """-> [dq, dk, dv, softmax_d (B,H,Sq)]. Nothing is summed atomically, so every call is deterministic."""
    refuse(gen_, descale_q=descale_q, descale_k=descale_k, descale_v=descale_v, descale_o=descale_o)
    refuse(None, descale_do=descale_do, descale_dq=descale_dq, descale_dk=descale_dk, descale_dv=descale_dv)
    score = (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap)
    if not computes(q):
        saved = (dout, q, k, v, out, softmax_lse, dq, dk, dv)
        return elsewhere("bwd", *saved, alibi_slopes, *score, deterministic, None, rng_state)
    problem = Problem(q, k, v, *score, alibi_slopes, rng_state=rng_state)
    return run_backward(problem, dout, out, softmax_lse, dq, dk, dv)


def varlen_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Optional[Tensor],
    dk: Optional[Tensor],
    dv: Optional[Tensor],
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    alibi_slopes: Optional[Tensor],
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    zero_tensors: bool,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    gen_=None,
    rng_state: Optional[Tensor] = None,
    descale_q: Optional[Tensor] = None,
    descale_k: Optional[Tensor] = None,
    descale_v: Optional[Tensor] = None,
    descale_o: Optional[Tensor] = None,
    descale_do: Optional[Tensor] = None,
    descale_dq: Optional[Tensor] = None,
    descale_dk: Optional[Tensor] = None,
    descale_dv: Optional[Tensor] = None,
) -> List[Tensor]:
    """-> [dq, dk, dv, softmax_d (H,Tq)], as `bwd`; rows past the last sequence get zeros."""
    refuse(gen_, descale_q=descale_q, descale_k=descale_k, descale_v=descale_v, descale_o=descale_o)
    refuse(None, descale_do=descale_do, descale_dq=descale_dq, descale_dk=descale_dk, descale_dv=descale_dv)
    score = (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap)
    lengths, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    if not computes(q):
        saved = (dout, q, k, v, out, softmax_lse, dq, dk, dv, *lengths, alibi_slopes, *longest)
        more = (*score[:2], zero_tensors, *score[2:], deterministic, None, rng_state)
        return elsewhere("varlen_bwd", *saved, *more)
    problem = Problem(q, k, v, *score, alibi_slopes, *lengths, *longest, rng_state=rng_state)
    return run_backward(problem, dout, out, softmax_lse, dq, dk, dv)


def fwd_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Optional[Tensor],
    v: Optional[Tensor],
    cache_seqlens: Optional[Tensor],
    rotary_cos: Optional[Tensor],
    rotary_sin: Optional[Tensor],
    cache_batch_idx: Optional[Tensor],
    cache_leftpad: Optional[Tensor],
    block_table: Optional[Tensor],
    alibi_slopes: Optional[Tensor],
    out: Optional[Tensor],
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    rotary_interleaved: bool,
    num_splits: int,
) -> List[Tensor]:
    """q (B,Sq,H,D) over the cache, to which k and v are appended first -> [out, softmax_lse (B,H,Sq)]."""
    score = (softmax_scale, causal, window_size_left, window_size_right, softcap)
    if not computes(q):
        cache = (q, k_cache, v_cache, k, v, cache_seqlens, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad)
        return elsewhere("fwd_kvcache", *cache, block_table, alibi_slopes, out, *score, rotary_interleaved, num_splits)
    stored = StoredKeys(
        Problem(q, k_cache, v_cache, 0.0, *score, alibi_slopes),
        cache_seqlens,
        cache_leftpad,
        block_table,
        cache_batch_idx,
    )
    return attend_cache(stored, k, v, rotary_cos, rotary_sin, rotary_interleaved, num_splits, out)
