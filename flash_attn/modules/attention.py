"""Attention without projections, as modules: on the kernels, and in plain torch with a padding mask."""

from __future__ import annotations

import math

import torch
import torch.nn as nn

from flash_attn import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

# What is added to hidden scores in plain torch. Finite, so that a row without keys gives a mean of values, not NaN.
HIDDEN = -10000.0


def get_alibi_slopes(nheads):
    """ALiBi's slopes, one for each head: Press et al. 2021 (https://arxiv.org/abs/2108.12409).

    2^(-8/n), 2^(-16/n), ... for n heads when n is a power of two; otherwise those of the power below, then every second
    one of the power above.
    """
    below = 2 ** int(math.log2(nheads))
    slopes = [2 ** (-8 * (i + 1) / below) for i in range(below)]
    return slopes if below == nheads else slopes + get_alibi_slopes(2 * below)[::2][: nheads - below]


def _check_packed(cu_seqlens, max_seqlen, suffix=""):
    assert cu_seqlens is not None and cu_seqlens.dtype == torch.int32, (
        f"cu_seqlens{suffix} is {None if cu_seqlens is None else cu_seqlens.dtype}; it must be int32 (B+1)."
    )
    assert max_seqlen is not None, (
        f"cu_seqlens{suffix} was given without max_seqlen{suffix}; pass the longest sequence's length."
    )


class _FlashAttention(nn.Module):
    """What flash attention on packed tensors keeps: see `FlashSelfAttention`."""

    def __init__(self, causal, softmax_scale, attention_dropout, window_size, alibi_slopes, deterministic):
        super().__init__()
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.drop = nn.Dropout(attention_dropout)
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)
        self.window_size = window_size
        self.deterministic = deterministic

    def _options(self, causal):
        return dict(
            dropout_p=self.drop.p if self.training else 0.0,
            softmax_scale=self.softmax_scale,
            causal=self.causal if causal is None else causal,
            # The module may have been cast to half precision.
            alibi_slopes=None if self.alibi_slopes is None else self.alibi_slopes.float(),
            window_size=self.window_size,
            deterministic=self.deterministic,
        )


class FlashSelfAttention(_FlashAttention):
    """`flash_attn_qkvpacked_func`, or its varlen form, as a module; attention_dropout in training only.

    The other arguments are those of `flash_attn_func`; alibi_slopes is a tensor (H) or (B,H).
    """

    def __init__(
        self,
        causal=False,
        softmax_scale=None,
        attention_dropout=0.0,
        window_size=(-1, -1),
        alibi_slopes=None,
        deterministic=False,
    ):
        super().__init__(causal, softmax_scale, attention_dropout, window_size, alibi_slopes, deterministic)

    def forward(self, qkv, causal=None, cu_seqlens=None, max_seqlen=None):
        """qkv (B,S,3,H,D) -> (B,S,H,D); with cu_seqlens and max_seqlen (T,3,H,D) -> (T,H,D).

        causal: replaces the module's for this call, unless None.
        """
        if cu_seqlens is None:
            return flash_attn_qkvpacked_func(qkv, **self._options(causal))
        _check_packed(cu_seqlens, max_seqlen)
        return flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, **self._options(causal))


class FlashCrossAttention(_FlashAttention):
    """`flash_attn_kvpacked_func`, or its varlen form, as a module; see `FlashSelfAttention`."""

    def __init__(
        self,
        causal=False,
        softmax_scale=None,
        attention_dropout=0.0,
        alibi_slopes=None,
        window_size=(-1, -1),
        deterministic=False,
    ):
        super().__init__(causal, softmax_scale, attention_dropout, window_size, alibi_slopes, deterministic)

    def forward(
        self,
        q,
        kv,
        causal=None,
        cu_seqlens=None,
        max_seqlen=None,
        cu_seqlens_k=None,
        max_seqlen_k=None,
    ):
        """q (B,Sq,H,D), kv (B,Sk,2,Hk,D) -> (B,Sq,H,D).

        With cu_seqlens, max_seqlen of q and cu_seqlens_k, max_seqlen_k of kv: q (Tq,H,D), kv (Tk,2,Hk,D) -> (Tq,H,D).
        """
        if cu_seqlens is None:
            return flash_attn_kvpacked_func(q, kv, **self._options(causal))
        _check_packed(cu_seqlens, max_seqlen)
        _check_packed(cu_seqlens_k, max_seqlen_k, "_k")
        lengths = (cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k)
        return flash_attn_varlen_kvpacked_func(q, kv, *lengths, **self._options(causal))


class _PlainAttention(nn.Module):
    """What plain attention keeps: see `SelfAttention`."""

    def __init__(self, causal=False, softmax_scale=None, attention_dropout=0.0):
        super().__init__()
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.drop = nn.Dropout(attention_dropout)

    def _attend(self, q, k, v, key_padding_mask, hide_future):
        """q (B,Sq,H,D), k, v (B,Sk,H,D) -> (B,Sq,H,D). hide_future: None, or a function of the scores (B,H,Sq,Sk)."""
        scale = q.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        scores = torch.einsum("bihd,bjhd->bhij", q, k * scale)
        if key_padding_mask is not None:
            padding = scores.new_zeros(q.shape[0], k.shape[1])  # so a mask of one sequence for all serves each
            scores = scores + padding.masked_fill_(~key_padding_mask, HIDDEN)[:, None, None]
        if hide_future is not None:
            scores = hide_future(scores)
        weights = self.drop(torch.softmax(scores, dim=-1, dtype=v.dtype))
        return torch.einsum("bhij,bjhd->bihd", weights, v)


class SelfAttention(_PlainAttention):
    """Attention in plain torch, in the dtype of its inputs. Hidden scores are lowered by 10000, not left out.

    attention_dropout acts in training only.
    """

    def forward(self, qkv, causal=None, key_padding_mask=None):
        """qkv (B,S,3,H,D), key_padding_mask bool (B,S), True = keep -> (B,S,H,D).

        causal: replaces the module's for this call, unless None.
        """
        causal = self.causal if causal is None else causal
        q, k, v = qkv.unbind(dim=2)

        def hide_future(scores):
            return scores + scores.new_full(scores.shape[-2:], HIDDEN).triu(1)

        return self._attend(q, k, v, key_padding_mask, hide_future if causal else None)


class CrossAttention(_PlainAttention):
    """`SelfAttention` with queries of their own and, where they are fewer, shared keys and values."""

    def forward(self, q, kv, causal=None, key_padding_mask=None):
        """q (B,Sq,H,D), kv (B,Sk,2,Hk,D), key_padding_mask bool (B,Sk), True = keep -> (B,Sq,H,D).

        causal: aligned to the bottom right corner of the keys that are kept, which must come first.
        """
        causal = self.causal if causal is None else causal
        Sq, Sk = q.shape[1], kv.shape[1]
        assert kv.shape[0] == q.shape[0] and kv.shape[4] == q.shape[3], (
            f"q has shape {tuple(q.shape)} and kv {tuple(kv.shape)}; batch and head dim must be equal."
        )
        if kv.shape[3] != q.shape[2]:
            kv = kv.repeat_interleave(q.shape[2] // kv.shape[3], dim=3)

        def hide_future(scores):
            kept = Sk if key_padding_mask is None else key_padding_mask.sum(-1)[:, None, None, None]
            i, j = torch.arange(Sq, device=q.device)[:, None], torch.arange(Sk, device=q.device)
            return scores.masked_fill(j > i + kept - Sq, HIDDEN)

        return self._attend(q, *kv.unbind(dim=2), key_padding_mask, hide_future if causal else None)
