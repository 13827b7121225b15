"""Rotary position embedding, differentiable: functions on queries, keys and packed tensors, and the module with tables.

RoFormer (Su et al. 2021, https://arxiv.org/abs/2104.09864); xPos scaling: Sun et al. 2022
(https://arxiv.org/abs/2212.10554). Letters, tables and offsets as in `flash_attn.ops.triton.rotary.apply_rotary`.
Gradients flow to the rotated tensor, not to the tables, and can be differentiated again. A gradient that comes in is
never written to.
"""

from __future__ import annotations

from typing import Optional, Union

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_attn._operators import is_compiling
from flash_attn.ops.triton.rotary import apply_rotary


def rotate_half(x, interleaved=False):
    """x (...,D) turned by a quarter: (a, b) -> (-b, a) for every pair of channels."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def apply_rotary_emb_torch(x, cos, sin, interleaved=False):
    """`apply_rotary_emb` in plain torch, in the dtype of its arguments: x (B,S,H,D), tables (S,R/2) or (B,S,R/2)."""
    rotary_dim = 2 * cos.shape[-1]
    assert rotary_dim <= x.shape[-1], (
        f"cos turns {rotary_dim} channels and x has head dim {x.shape[-1]}; shorten the tables."
    )

    def per_channel(table):
        table = table.repeat_interleave(2, dim=-1) if interleaved else torch.cat((table, table), dim=-1)
        return table.unsqueeze(-2)

    turning, still = x[..., :rotary_dim], x[..., rotary_dim:]
    turned = turning * per_channel(cos) + rotate_half(turning, interleaved) * per_channel(sin)
    return torch.cat((turned, still), dim=-1)


def _save(ctx, tables, seqlen_offsets, cu_seqlens=None):
    """Keeps tensors and numbers for backward where each belongs."""
    is_tensor = isinstance(seqlen_offsets, Tensor)
    ctx.save_for_backward(*tables, seqlen_offsets if is_tensor else None, cu_seqlens)
    ctx.seqlen_offset = 0 if is_tensor else seqlen_offsets


def _load(ctx):
    """(tables, seqlen_offsets, cu_seqlens) as `_save` got them."""
    *tables, offsets, cu_seqlens = ctx.saved_tensors
    return tables, ctx.seqlen_offset if offsets is None else offsets, cu_seqlens


class ApplyRotaryEmb(torch.autograd.Function):
    """`apply_rotary_emb`; conjugate rotates the other way, which is the derivative."""

    @staticmethod
    def forward(
        ctx,
        x,
        cos,
        sin,
        interleaved=False,
        inplace=False,
        seqlen_offsets: Union[int, Tensor] = 0,
        cu_seqlens: Optional[Tensor] = None,
        max_seqlen: Optional[int] = None,
        conjugate=False,
    ):
        _save(ctx, (cos, sin), seqlen_offsets, cu_seqlens)
        ctx.interleaved, ctx.max_seqlen, ctx.conjugate = interleaved, max_seqlen, conjugate
        return apply_rotary(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved, inplace, conjugate)

    @staticmethod
    def backward(ctx, do):
        (cos, sin), offsets, cu_seqlens = _load(ctx)
        args = (cos, sin, ctx.interleaved, False, offsets, cu_seqlens, ctx.max_seqlen, not ctx.conjugate)
        return (ApplyRotaryEmb.apply(do, *args), *[None] * 8)


def _may_be_differentiated(x):
    return (
        is_compiling() or (torch.is_grad_enabled() and x.requires_grad) or forward_ad.unpack_dual(x).tangent is not None
    )


def apply_rotary_emb(
    x,
    cos,
    sin,
    interleaved=False,
    inplace=False,
    seqlen_offsets: Union[int, Tensor] = 0,
    cu_seqlens: Optional[Tensor] = None,
    max_seqlen: Optional[int] = None,
):
    """Rotates x (B,S,H,D), or (T,H,D) with cu_seqlens and max_seqlen; arguments as in `apply_rotary`.

    inplace: the result is x's memory. Use the result: it carries the gradient, x only the values. An operation that
        has saved x for its own backward then has a wrong one; autograd notices unless x is a view.
    """
    # Out of place, the operator has its derivative itself.
    if inplace and _may_be_differentiated(x):
        return ApplyRotaryEmb.apply(x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen)
    return apply_rotary(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved, inplace)


apply_rotary_emb_func = apply_rotary_emb


def _queries_and_keys(qkv, num_heads_q):
    """Views of the queries (B,S,H,D) and keys (B,S,Hk,D) in qkv."""
    if qkv.dim() == 5:
        assert qkv.shape[2] == 3, f"qkv has shape {tuple(qkv.shape)}; with five dims it must be (B,S,3,H,D)."
        return qkv[:, :, 0], qkv[:, :, 1]
    assert qkv.dim() == 4, f"qkv has shape {tuple(qkv.shape)}; it must be (B,S,3,H,D) or (B,S,H+2*Hk,D)."
    assert num_heads_q is not None, "qkv has four dims, (B,S,H+2*Hk,D): pass num_heads_q, which is H."
    num_heads_k, odd = divmod(qkv.shape[2] - num_heads_q, 2)
    assert num_heads_q > 0 and num_heads_k >= 0 and not odd, (
        f"qkv has {qkv.shape[2]} heads and num_heads_q is {num_heads_q}; what is left must be keys and as many values."
    )
    return qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + num_heads_k]


def _apply_rotary_emb_qkv(
    qkv,
    cos,
    sin,
    cos_k=None,
    sin_k=None,
    interleaved=False,
    inplace=False,
    conjugate=False,
    seqlen_offsets: Union[int, Tensor] = 0,
    num_heads_q: Optional[int] = None,
):
    """Rotates the queries and keys of qkv; not differentiable."""
    q, k = _queries_and_keys(qkv, num_heads_q)
    options = dict(seqlen_offsets=seqlen_offsets, interleaved=interleaved, inplace=inplace, conjugate=conjugate)
    q = apply_rotary(q, cos, sin, **options)
    k = apply_rotary(k, cos if cos_k is None else cos_k, sin if sin_k is None else sin_k, **options)
    if inplace:
        return qkv
    # Joined, not written into a copy: torch 2.6 compiles no writes to views in a backward.
    if qkv.dim() == 5:
        return torch.cat((q.unsqueeze(2), k.unsqueeze(2), qkv[:, :, 2:]), dim=2)
    return torch.cat((q, k, qkv[:, :, q.shape[2] + k.shape[2] :]), dim=2)


class ApplyRotaryEmbQKV_(torch.autograd.Function):
    """`apply_rotary_emb_qkv_`; conjugate and inplace serve the derivative."""

    @staticmethod
    def forward(
        ctx,
        qkv,
        cos,
        sin,
        cos_k=None,
        sin_k=None,
        interleaved=False,
        seqlen_offsets: Union[int, Tensor] = 0,
        num_heads_q: Optional[int] = None,
        conjugate=False,
        inplace=True,
    ):
        _save(ctx, (cos, sin, cos_k, sin_k), seqlen_offsets)
        ctx.interleaved, ctx.num_heads_q, ctx.conjugate = interleaved, num_heads_q, conjugate
        tables = (cos, sin, cos_k, sin_k)
        return _apply_rotary_emb_qkv(qkv, *tables, interleaved, inplace, conjugate, seqlen_offsets, num_heads_q)

    @staticmethod
    def backward(ctx, dqkv):
        tables, offsets, _ = _load(ctx)
        args = (*tables, ctx.interleaved, offsets, ctx.num_heads_q, not ctx.conjugate, False)
        return (ApplyRotaryEmbQKV_.apply(dqkv, *args), *[None] * 9)


def apply_rotary_emb_qkv_(
    qkv,
    cos,
    sin,
    cos_k=None,
    sin_k=None,
    interleaved=False,
    seqlen_offsets: Union[int, torch.Tensor] = 0,
    num_heads_q: Optional[int] = None,
):
    """Rotates the queries and keys of qkv in place and returns it; values stay.

    qkv: (B,S,3,H,D), or (B,S,H+2*Hk,D) with num_heads_q = H: queries, keys, values. Any strides.
    cos_k, sin_k: tables of the keys where they differ from those of the queries (xPos).
    In place as in `apply_rotary_emb`, with qkv as a view.
    """
    return ApplyRotaryEmbQKV_.apply(qkv, cos, sin, cos_k, sin_k, interleaved, seqlen_offsets, num_heads_q)


class ApplyRotaryEmbKV_(torch.autograd.Function):
    """`apply_rotary_emb_kv_`; conjugate and inplace serve the derivative."""

    @staticmethod
    def forward(
        ctx,
        kv,
        cos,
        sin,
        interleaved=False,
        seqlen_offsets: Union[int, Tensor] = 0,
        conjugate=False,
        inplace=True,
    ):
        assert kv.dim() == 5 and kv.shape[2] == 2, f"kv has shape {tuple(kv.shape)}; it must be (B,S,2,Hk,D)."
        _save(ctx, (cos, sin), seqlen_offsets)
        ctx.interleaved, ctx.conjugate = interleaved, conjugate
        options = dict(interleaved=interleaved, inplace=inplace, conjugate=conjugate)
        k = apply_rotary(kv[:, :, 0], cos, sin, seqlen_offsets, **options)
        return kv if inplace else torch.cat((k.unsqueeze(2), kv[:, :, 1:]), dim=2)

    @staticmethod
    def backward(ctx, dkv):
        tables, offsets, _ = _load(ctx)
        args = (*tables, ctx.interleaved, offsets, not ctx.conjugate, False)
        return (ApplyRotaryEmbKV_.apply(dkv, *args), *[None] * 6)


def apply_rotary_emb_kv_(kv, cos, sin, interleaved=False, seqlen_offsets: Union[int, torch.Tensor] = 0):
    """Rotates the keys of kv (B,S,2,Hk,D) in place and returns it; values stay."""
    return ApplyRotaryEmbKV_.apply(kv, cos, sin, interleaved, seqlen_offsets)


class RotaryEmbedding(torch.nn.Module):
    """Rotates queries and keys with tables that it keeps and extends: position p turns pair i by p * base^(-2i / dim).

    dim: R, the channels that turn, even.
    base: of the wavelengths, 2 pi to base * 2 pi positions.
    interleaved: pairs are channels (0,1), (2,3), ...; otherwise (i, i + R/2).
    scale_base: None, or xPos: queries are also multiplied, and keys divided, by
        ((2i + 0.4 dim) / (1.4 dim)) ^ ((p - positions // 2) / scale_base), so that far keys count less.
    """

    def __init__(self, dim: int, base=10000.0, interleaved=False, scale_base=None, device=None):
        super().__init__()
        self.dim = dim
        self.base = float(base)
        self.interleaved = interleaved
        self.scale_base = scale_base
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        self.register_buffer("scale", None if scale_base is None else self._compute_scale(device), persistent=False)
        self._seq_len_cached = 0
        self._cos_cached = None
        self._sin_cached = None
        self._cos_k_cached = None
        self._sin_k_cached = None

    def _compute_inv_freq(self, device=None):
        return 1.0 / self.base ** (torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim)

    def _compute_scale(self, device=None):
        return (torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) + 0.4 * self.dim) / (1.4 * self.dim)

    def _cache_serves(self, seqlen, device, dtype):
        cos = self._cos_cached
        return cos is not None and seqlen <= self._seq_len_cached and cos.device == device and cos.dtype == dtype

    def _update_cos_sin_cache(self, seqlen, device=None, dtype=None):
        """Makes the tables cover `seqlen` positions on that device in that dtype (None: those of inv_freq)."""
        device = self.inv_freq.device if device is None else torch.device(device)
        dtype = self.inv_freq.dtype if dtype is None else dtype
        if self._cache_serves(seqlen, device, dtype):
            return
        # Training may follow, and autograd cannot save tensors that were made in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            self._make_tables(seqlen, device, dtype)
        self._seq_len_cached = seqlen

    def _make_tables(self, seqlen, device, dtype):
        # A module that was cast to half precision has lost the digits of its buffers.
        exact = self.inv_freq.dtype == torch.float32
        inv_freq = self.inv_freq.to(device) if exact else self._compute_inv_freq(device)
        positions = torch.arange(seqlen, device=device, dtype=torch.float32)
        angles = torch.outer(positions, inv_freq)
        cos, sin = angles.cos(), angles.sin()
        if self.scale is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        power = (positions - seqlen // 2) / self.scale_base
        scale = (self.scale.to(device) if exact else self._compute_scale(device)) ** power[:, None]
        self._cos_cached, self._sin_cached = (cos * scale).to(dtype), (sin * scale).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / scale).to(dtype), (sin / scale).to(dtype)

    def _tables(self, x, seqlen_offset, max_seqlen):
        """((cos, sin) of queries, (cos, sin) of keys) that cover x."""
        # torch.export of torch 2.8 leaves those of its trace, without numbers, and operators take them.
        if type(self._cos_cached) not in (type(None), Tensor, type(x)):
            self._cos_cached = None
        assert isinstance(seqlen_offset, Tensor) or seqlen_offset >= 0, (
            f"seqlen_offset is {seqlen_offset}; it must be at least 0."
        )
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, device=x.device, dtype=x.dtype)
        elif not isinstance(seqlen_offset, Tensor):
            self._update_cos_sin_cache(x.shape[1] + seqlen_offset, device=x.device, dtype=x.dtype)
        elif self._cos_cached is None:
            raise ValueError("seqlen_offset is a tensor and there are no tables yet: pass max_seqlen, their length.")
        queries = (self._cos_cached, self._sin_cached)
        return queries, queries if self.scale is None else (self._cos_k_cached, self._sin_k_cached)

    def forward(
        self,
        qkv: torch.Tensor,
        kv: Optional[torch.Tensor] = None,
        seqlen_offset: Union[int, torch.Tensor] = 0,
        max_seqlen: Optional[int] = None,
        num_heads_q: Optional[int] = None,
    ):
        """Rotates in place and returns qkv or, where kv was given, (q, kv).

        qkv: (B,S,3,H,D), or (B,S,H+2*Hk,D) with num_heads_q = H; with kv: the queries (B,S,H,D).
        kv: (B,Sk,2,Hk,D).
        seqlen_offset: position of the first token, an int, or a tensor (B) with one for each sequence.
        max_seqlen: positions that the tables must cover; pass it where seqlen_offset is a tensor.
        """
        longest = qkv if kv is None or kv.shape[1] <= qkv.shape[1] else kv
        queries, keys = self._tables(longest, seqlen_offset, max_seqlen)
        options = dict(interleaved=self.interleaved, seqlen_offsets=seqlen_offset)
        if kv is None:
            keys = (None, None) if self.scale is None else keys
            return apply_rotary_emb_qkv_(qkv, *queries, *keys, num_heads_q=num_heads_q, **options)
        q = apply_rotary_emb_func(qkv, *queries, inplace=True, **options)
        return q, apply_rotary_emb_kv_(kv, *keys, **options)
