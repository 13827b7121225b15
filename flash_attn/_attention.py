"""The public attention functions: differentiable, traceable by torch.compile(fullgraph=True).

The algorithm is FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691). `flash_attn_func` documents the
arguments that all of them take.
"""

from __future__ import annotations

from flash_attn import _native, _raw  # loads the binding, which registers torch.ops.flash_attn  # noqa: F401
from flash_attn._operators import Operator, as_int

_attention = Operator("attention", ("q", "k", "v"))
_attention_kvpacked = Operator("attention_kvpacked", ("q", "kv"))
_attention_qkvpacked = Operator("attention_qkvpacked", ("qkv",))

# What these functions take after upstream's arguments.
EXTENSIONS = (
    "attn_bias",
    "attn_mask",
    "learnable_sink",
    "key_begin",
    "key_end",
    "seqused_k",
    "leftpad_k",
    "num_splits",
    "check_inputs",
)

_DENSE = (None, None, 0, 0)  # no cu_seqlens_q, cu_seqlens_k; their max_seqlen_q, max_seqlen_k are unused


def _check_lengths(lengths, q, k):
    """Raises RuntimeError unless cu_seqlens describe the packed rows of q and of k (None: pages, which have none)."""
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = lengths
    check = _native.load()._check_lengths
    check(cu_seqlens_q, True, q.shape[0], max_seqlen_q)
    if k is not None:
        check(cu_seqlens_k, False, k.shape[0], max_seqlen_k)


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    attn_bias=None,
    attn_mask=None,
    learnable_sink=None,
    key_begin=None,
    key_end=None,
):
    """Attention of q (B,Sq,H,D) over k (B,Sk,Hk,D) and v (B,Sk,Hk,Dv): out (B,Sq,H,Dv).

    Letters: B batch, H query heads, Hk key/value heads (H % Hk == 0; query head h reads kv head h // (H // Hk)),
    Sq / Sk query / key length, D head dim of queries and keys, Dv of values (each 1 to 576, on GPUs to 256); Tq / Tk
    tokens of a packed batch.

    q, k, v: fp16, bf16, fp32 or fp64 (fp64 on the CPU), all the same, on one device, any strides (copied where the
        last is not 1). Gradients flow to these.
    dropout_p: probability in [0, 1) with which a softmax weight is dropped; the others are scaled by 1 / (1 - p).
        The mask follows torch.manual_seed and is the same in backward. Pass 0.0 for evaluation.
    softmax_scale: score = softmax_scale * q.k; None is D ** -0.5.
    causal: query i sees key j iff j <= i + Sk - Sq (aligned to the bottom right corner).
    window_size: (left, right), any two-item indexable. Query i sees keys [i + Sk - Sq - left, i + Sk - Sq + right];
        a negative item or None is unbounded, so is None for both. causal=True makes right 0.
    softcap: > 0: score = softcap * tanh(score / softcap), before ALiBi and mask. Not together with dropout.
    alibi_slopes: fp32 (H) or (B,H): adds -slope * |i + Sk - Sq - j| to the score. No gradient.
    deterministic: bit-identical gradients from run to run, which those of every backend are without it, too.
    return_attn_probs: also return softmax_lse and S_dmask. Gradient flows through softmax_lse, not through S_dmask.

    Beyond upstream, after its arguments (a dimension of size 1 holds for all; all of them combine with one another).
    On the CPU only so far; on a GPU each raises NotImplementedError:

    attn_bias: (B|1,H|1,Sq|1,Sk), dtype of q or fp32: added to the score after softcap, as ALiBi is. -inf (anything
        below -1e30) masks. Gradient flows to it, summed in a fixed order where it is broadcast.
    attn_mask: bool (B,Sk), (B,Sq,Sk) or (B,H,Sq,Sk), True where the key is kept. Two dimensions are a key padding mask.
    learnable_sink: (H), dtype of q or fp32: one more logit in every row's softmax, whose value is zero. It is part of
        softmax_lse. Gradient flows to it.
    key_begin, key_end: int32 (B|1,Sq) or (B|1,H|1,Sq): row i sees keys [key_begin[i], key_end[i]) at most, whatever
        causal and window allow. Prefix-LM: key_end = max(i + 1, prefix), causal=False. Packed documents: key_begin =
        the document's first position, causal=True. No tensor of Sq x Sk is needed, and what no row of a tile sees is
        skipped.

    Returns out in q's dtype or, with return_attn_probs, (out, softmax_lse, S_dmask):
    softmax_lse (B,H,Sq): natural log of the softmax denominator, fp32 (fp64 when q is); +inf for a row that sees
        neither a key nor a sink, whose out and gradients are 0.
    S_dmask (B,H,Sq,Sk), for tests: q's dtype. exp(score - row maximum), negative where dropout dropped the weight;
        shape (0) when dropout_p is 0.

    Raises RuntimeError for malformed input (ValueError for a window_size without two items), naming the argument,
    what was passed and what is accepted.
    """
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    scores = (attn_bias, attn_mask, learnable_sink, key_begin, key_end)
    return _attention.call(q, k, v, *_DENSE, *options, *scores)


def flash_attn_kvpacked_func(
    q,
    kv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    attn_bias=None,
    attn_mask=None,
    learnable_sink=None,
    key_begin=None,
    key_end=None,
):
    """`flash_attn_func` of q (B,Sq,H,D) and kv (B,Sk,2,Hk,D), keys then values: out (B,Sq,H,D).

    Backward writes one gradient for kv, without concatenating those of keys and values.
    """
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    scores = (attn_bias, attn_mask, learnable_sink, key_begin, key_end)
    return _attention_kvpacked.call(q, kv, *_DENSE, *options, *scores)


def flash_attn_qkvpacked_func(
    qkv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    attn_bias=None,
    attn_mask=None,
    learnable_sink=None,
    key_begin=None,
    key_end=None,
):
    """`flash_attn_func` of qkv (B,S,3,H,D), queries, keys, values: out (B,S,H,D). Backward writes one gradient."""
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    scores = (attn_bias, attn_mask, learnable_sink, key_begin, key_end)
    return _attention_qkvpacked.call(qkv, *_DENSE, *options, *scores)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
    attn_bias=None,
    attn_mask=None,
    learnable_sink=None,
    key_begin=None,
    key_end=None,
    seqused_k=None,
    leftpad_k=None,
    num_splits=0,
    check_inputs=False,
):
    """Attention within each sequence of a packed batch: q (Tq,H,D), k (Tk,Hk,D), v (Tk,Hk,Dv) -> out (Tq,H,Dv).

    cu_seqlens_q, cu_seqlens_k: int32 (B+1) on q's device, contiguous, from 0: sequence b is rows cu_seqlens[b] to
        cu_seqlens[b+1] - 1. Empty sequences are fine on either side.
    max_seqlen_q, max_seqlen_k: int (or one-item tensor), at least the longest sequence.
    block_table: int32 (B,max_pages): k (num_pages,page,Hk,D) and v (num_pages,page,Hk,Dv) are pages of any size, and
        page n of sequence b is block_table[b,n]. cu_seqlens_k then only gives lengths. No gradient.

    attn_bias (B|1,H|1,max_seqlen_q|1,max_seqlen_k), attn_mask (B,max_seqlen_k), (B,max_seqlen_q,max_seqlen_k) or 4-D:
        rows and keys count from the beginning of each sequence; what lies past its end has gradient 0.
    key_begin, key_end: (Tq) or (H|1,Tq), one per packed row; positions within the row's own sequence.

    seqused_k, leftpad_k: int32 (B): of sequence b only keys leftpad_k[b] to seqused_k[b] - 1 are there. No gradient.
        The first of them, leftpad_k[b], is key 0 for attn_bias, attn_mask, key_begin and key_end, and their number Sk.
    num_splits: 0 to 128, in how many ranges keys may be taken; never changes what is computed. Above 1 the native
        kernels of GPUs raise NotImplementedError.
    check_inputs: read cu_seqlens and raise RuntimeError when they do not describe the packed rows. Calls on the CPU
        always do; on a GPU that waits for what is queued, and calls without it clamp the lengths to the tensors.

    With return_attn_probs: (out, softmax_lse (H,Tq), S_dmask (B,H,max_seqlen_q,max_seqlen_k)).
    The other arguments, dtypes and errors: see `flash_attn_func`; Sq and Sk are each sequence's own lengths.
    """
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    scores = (attn_bias, attn_mask, learnable_sink, key_begin, key_end)
    storage = (block_table, leftpad_k, seqused_k, num_splits)
    lengths = (cu_seqlens_q, cu_seqlens_k, as_int(max_seqlen_q), as_int(max_seqlen_k))
    if check_inputs:
        _check_lengths(lengths, q, k if block_table is None else None)
    return _attention.call(q, k, v, *lengths, *options, *scores, *storage)


def flash_attn_varlen_kvpacked_func(
    q,
    kv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    attn_bias=None,
    attn_mask=None,
    learnable_sink=None,
    key_begin=None,
    key_end=None,
    check_inputs=False,
):
    """`flash_attn_varlen_func` of q (Tq,H,D) and kv (Tk,2,Hk,D), keys then values: out (Tq,H,D)."""
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    scores = (attn_bias, attn_mask, learnable_sink, key_begin, key_end)
    lengths = (cu_seqlens_q, cu_seqlens_k, as_int(max_seqlen_q), as_int(max_seqlen_k))
    if check_inputs:
        _check_lengths(lengths, q, kv)
    return _attention_kvpacked.call(q, kv, *lengths, *options, *scores)


def flash_attn_varlen_qkvpacked_func(
    qkv,
    cu_seqlens,
    max_seqlen,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    attn_bias=None,
    attn_mask=None,
    learnable_sink=None,
    key_begin=None,
    key_end=None,
    check_inputs=False,
):
    """`flash_attn_varlen_func` of qkv (T,3,H,D), queries, keys, values, with cu_seqlens for both: out (T,H,D)."""
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    scores = (attn_bias, attn_mask, learnable_sink, key_begin, key_end)
    longest = as_int(max_seqlen)
    lengths = (cu_seqlens, cu_seqlens, longest, longest)
    if check_inputs:
        _check_lengths(lengths, qkv, qkv)
    return _attention_qkvpacked.call(qkv, *lengths, *options, *scores)
