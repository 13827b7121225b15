"""FlashAttention-3's training functions (Shah et al. 2024, arXiv 2407.08608), on those of `flash_attn`."""

from __future__ import annotations

import torch

from flash_attn import _attention
from flash_attn import _fa3_arguments as arguments
from flash_attn._tensor_kinds import check_kinds


def flash_attn_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    """Attention of q (B,Sq,H,D) over k (B,Sk,Hk,D) and v (B,Sk,Hk,Dv): out (B,Sq,H,Dv) in q's dtype.

    softmax_scale: None is D ** -0.5, with qv (D + Dv) ** -0.5.
    qv: (B,Sq,H,Dv), q's dtype: score = softmax_scale * (q.k + qv.v). D + Dv <= 576. It costs copies of q and k.
    attention_chunk: c > 0: the row whose diagonal is at key p = i + Sk - Sq sees keys of p's chunk of c keys only.
    num_splits (0 to 256), pack_gqa (None, True, False), sm_margin (0 or more): hints for upstream's kernels; checked,
        and without effect on what is computed.
    q_descale, k_descale, v_descale: NotImplementedError, until there is fp8 attention.
    return_attn_probs: return (out, softmax_lse (B,H,Sq)). softmax_lse is -inf for rows that see no key; +inf for all
        when Sk is 0.

    The other arguments, dtypes and errors: `flash_attn.flash_attn_func`. Gradients flow to q, k, v and qv, also with
    attention_chunk and through softmax_lse, which upstream does not have.
    """
    check_kinds(("q", "k", "v"), (q, k, v))
    arguments.check_no_fp8(q, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    arguments.check_hints(num_splits, pack_gqa, sm_margin)
    arguments.check_chunk(attention_chunk)
    queries, keys = arguments.with_qv(q, k, v, qv)
    Sk = k.shape[1] if k.dim() > 1 else 0
    out, softmax_lse, _ = _attention.flash_attn_func(
        queries,
        keys,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        return_attn_probs=True,
        **arguments.dense_chunk_bounds(q, Sk, attention_chunk),
    )
    return (out, arguments.upstream_lse(softmax_lse, Sk)) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv,
    softmax_scale=None,
    causal=False,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    deterministic=False,
    num_heads_q=None,
    sm_margin=0,
    return_attn_probs=False,
):
    """`flash_attn_func` of qkv (B,S,3,H,D), or (B,S,H+2*Hk,D) with num_heads_q = H: queries, keys, values."""
    check_kinds(("qkv",), (qkv,))
    if qkv.dim() == 5:
        if qkv.shape[2] != 3 or num_heads_q not in (None, qkv.shape[3]):
            raise RuntimeError(
                f"qkv has shape {tuple(qkv.shape)} and num_heads_q is {num_heads_q!r}; five dimensions must be "
                "(B,S,3,H,D) with num_heads_q None or H."
            )
        q, k, v = qkv.unbind(2)
    else:
        kv_heads = qkv.shape[2] - num_heads_q if qkv.dim() == 4 and num_heads_q is not None else -1
        if kv_heads < 2 or kv_heads % 2 or num_heads_q < 1:
            raise RuntimeError(
                f"qkv has shape {tuple(qkv.shape)} and num_heads_q is {num_heads_q!r}; qkv must be (B,S,3,H,D), or "
                "(B,S,H+2*Hk,D) with num_heads_q = H."
            )
        q, k, v = qkv.split((num_heads_q, kv_heads // 2, kv_heads // 2), dim=2)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
    )


def _needs_gradient(*tensors):
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    """Attention within each sequence of a packed batch: q (Tq,H,D), k (Tk,Hk,D), v (Tk,Hk,Dv) -> out (Tq,H,Dv).

    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as in `flash_attn.flash_attn_varlen_func`.
    seqused_q, seqused_k: int32 (B): of sequence b only the first seqused_q[b] rows and seqused_k[b] keys are there:
        they are its Sq and Sk. Other rows give out 0, softmax_lse -inf and gradients 0. seqused_q copies q and out,
        seqused_k copies k and v where gradients are asked for.
    qv: (Tq,H,Dv). With return_attn_probs: (out, softmax_lse (H,Tq)).
    The other arguments: `flash_attn_func` of this module.
    """
    tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k)
    check_kinds(("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"), tensors)
    arguments.check_no_fp8(q, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    num_splits = arguments.check_hints(num_splits, pack_gqa, sm_margin)
    arguments.check_chunk(attention_chunk)
    queries, keys = arguments.with_qv(q, k, v, qv)
    Tk, back = k.shape[0] if k.dim() > 0 else 0, None
    if seqused_q is not None:
        order, cu_seqlens_q = arguments.used_rows_first("seqused_q", seqused_q, cu_seqlens_q, q.shape[0])
        queries, back = queries[order], order.sort().indices
    if seqused_k is not None and _needs_gradient(queries, keys, v):
        order, cu_seqlens_k = arguments.used_rows_first("seqused_k", seqused_k, cu_seqlens_k, Tk)
        keys, v, seqused_k = keys[order], v[order], None
    Sk = cu_seqlens_k.flatten().diff() if seqused_k is None else seqused_k
    out, softmax_lse, _ = _attention.flash_attn_varlen_func(
        queries,
        keys,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        return_attn_probs=True,
        **arguments.packed_chunk_bounds(cu_seqlens_q, q.shape[0], Sk, attention_chunk),
        seqused_k=seqused_k,
        num_splits=num_splits,
    )
    if back is not None:
        out, softmax_lse = out[back], softmax_lse[:, back]
    return (out, arguments.upstream_lse(softmax_lse, Tk)) if return_attn_probs else out
