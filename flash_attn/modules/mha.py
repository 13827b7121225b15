"""Multi-head attention with its projections, with upstream's names and state_dict keys.

Letters: E embed_dim, H query heads, Hk key/value heads, D = E / H. Wqkv's outputs are queries, keys and values: H*D,
Hk*D, Hk*D.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from flash_attn import flash_attn_with_kvcache
from flash_attn.layers.rotary import RotaryEmbedding
from flash_attn.modules.attention import (
    CrossAttention,
    FlashCrossAttention,
    FlashSelfAttention,
    SelfAttention,
    get_alibi_slopes,
)
from flash_attn.ops.fused_dense import ColumnParallelLinear, FusedDense, RowParallelLinear
from flash_attn.utils.distributed import get_dim_for_local_rank


def _cache_rows(inference_params, batch):
    first = inference_params.batch_size_offset
    return slice(first, first + batch)


def _update_kv_cache(kv, inference_params, layer_idx):
    """Writes kv (B,S,2,Hk,D) behind the seqlen_offset tokens of the layer's cache, which the first call allocates.

    Returns the view (B, seqlen_offset + S, 2, Hk, D) of what is there now.
    """
    caches = inference_params.key_value_memory_dict
    if layer_idx not in caches:
        extents = (inference_params.max_batch_size, inference_params.max_seqlen)
        caches[layer_idx] = kv.new_empty(*extents, *kv.shape[2:])
    cache, rows = caches[layer_idx], _cache_rows(inference_params, kv.shape[0])
    first, end = inference_params.seqlen_offset, inference_params.seqlen_offset + kv.shape[1]
    assert rows.stop <= cache.shape[0] and end <= cache.shape[1], (
        f"the cache has {cache.shape[0]} sequences of {cache.shape[1]} tokens, and sequence {rows.stop - 1} would grow "
        f"to {end}; give InferenceParams larger extents."
    )
    cache[rows, first:end] = kv
    return cache[rows, :end]


class _MultiHead(nn.Module):
    """Everything between the projections: rotation, attention, the cache of generation."""

    def _set_up(
        self,
        heads,
        heads_kv,
        causal,
        layer_idx,
        dropout,
        softmax_scale,
        rotary,
        use_alibi,
        window_size,
        use_flash_attn,
        checkpointing,
        device,
    ):
        """heads, heads_kv: of this rank. rotary: (dim, base, scale_base, interleaved)."""
        assert use_flash_attn or not use_alibi, "use_alibi needs use_flash_attn=True; pass both, or neither."
        assert use_flash_attn or tuple(window_size) == (-1, -1), (
            f"window_size is {window_size}; without use_flash_attn=True it must be (-1, -1)."
        )
        self.causal = causal
        self.layer_idx = layer_idx
        self.use_flash_attn = use_flash_attn
        self.checkpointing = checkpointing
        self._heads, self._heads_kv = heads, heads_kv
        self.rotary_emb_dim, base, scale_base, interleaved = rotary
        if self.rotary_emb_dim > 0:
            self.rotary_emb = RotaryEmbedding(self.rotary_emb_dim, base, interleaved, scale_base, device)
        inner, inner_cross = SelfAttention, CrossAttention
        if use_flash_attn:
            slopes = torch.tensor(self._alibi_slopes(), device=device) if use_alibi else None
            options = dict(alibi_slopes=slopes, window_size=window_size)
            inner, inner_cross = partial(FlashSelfAttention, **options), partial(FlashCrossAttention, **options)
        options = dict(causal=causal, softmax_scale=softmax_scale, attention_dropout=dropout)
        self.inner_attn, self.inner_cross_attn = inner(**options), inner_cross(**options)

    def _alibi_slopes(self):
        """Slopes of this rank's heads."""
        return get_alibi_slopes(self.num_heads)

    def allocate_inference_cache(self, batch_size, max_seqlen, dtype=None):
        """An empty cache (batch_size, max_seqlen, 2, Hk, D) for `InferenceParams.key_value_memory_dict[layer_idx]`."""
        weight = self.out_proj.weight
        shape = (batch_size, max_seqlen, 2, self._heads_kv, self.head_dim)
        return torch.empty(shape, dtype=weight.dtype if dtype is None else dtype, device=weight.device)

    def _split(self, qkv):
        """qkv (...,(H+2*Hk)*D) -> [qkv (...,3,H,D)], or [q (...,H,D), kv (...,2,Hk,D)] where keys have fewer heads."""
        if self._heads == self._heads_kv:
            return [qkv.unflatten(-1, (3, self._heads, self.head_dim))]
        q, kv = qkv.split([self._heads * self.head_dim, 2 * self._heads_kv * self.head_dim], dim=-1)
        return self._split_apart(q, kv)

    def _split_apart(self, q, kv):
        q = q.unflatten(-1, (self._heads, self.head_dim))
        return [q, kv.unflatten(-1, (2, self._heads_kv, self.head_dim))]

    def _attend(self, tensors, inference_params, **kwargs):
        """tensors: [qkv] or [q, kv], as `_split` gives them -> (...,E)."""
        if self.rotary_emb_dim > 0:
            tensors = self._rotate(tensors, inference_params)
        if inference_params is not None:
            q, kv = tensors if len(tensors) == 2 else (tensors[0][:, :, 0], tensors[0][:, :, 1:])
            return self._update_kvcache_attention(q, kv, inference_params).flatten(-2)
        inner = self.inner_attn if len(tensors) == 1 else self.inner_cross_attn
        if self.checkpointing:
            return checkpoint(inner, *tensors, use_reentrant=False, **kwargs).flatten(-2)
        return inner(*tensors, **kwargs).flatten(-2)

    def _rotate(self, tensors, inference_params):
        if inference_params is None:
            rotated = self.rotary_emb(*tensors)
        else:
            offset = self._cached_lengths(tensors[0].shape[0], inference_params)
            rotated = self.rotary_emb(*tensors, seqlen_offset=offset, max_seqlen=inference_params.max_seqlen)
        return rotated if isinstance(rotated, tuple) else [rotated]

    @staticmethod
    def _cached_lengths(batch, inference_params):
        """Tokens in the cache: an int, or int32 (B)."""
        lengths = inference_params.lengths_per_sample
        return inference_params.seqlen_offset if lengths is None else lengths[_cache_rows(inference_params, batch)]

    def _caches(self, inference_params):
        """Of all layers. This one's is there, unless nothing has been generated yet."""
        assert self.layer_idx is not None, (
            "generation finds a layer's cache by its layer_idx: pass one to the constructor."
        )
        caches = inference_params.key_value_memory_dict
        assert self.layer_idx in caches or inference_params.seqlen_offset == 0, (
            f"seqlen_offset is {inference_params.seqlen_offset} and layer {self.layer_idx} has no cache yet: call it "
            "with seqlen_offset 0 first, or put what allocate_inference_cache returns into key_value_memory_dict."
        )
        return caches

    def _update_kv_cache(self, kv, inference_params):
        self._caches(inference_params)
        return _update_kv_cache(kv, inference_params, self.layer_idx)

    def _update_kvcache_attention(self, q, kv, inference_params):
        """Appends kv (B,S,2,Hk,D) to the cache, then lets q (B,S,H,D) attend to all of it: (B,S,H,D)."""
        if inference_params.seqlen_offset == 0:
            return self.inner_cross_attn(q, self._update_kv_cache(kv, inference_params))
        if not self.use_flash_attn:
            assert inference_params.lengths_per_sample is None, (
                "lengths_per_sample needs use_flash_attn=True; build the module with it, or leave them None."
            )
            return self.inner_cross_attn(q, self._update_kv_cache(kv, inference_params))
        inner = self.inner_cross_attn
        rows = _cache_rows(inference_params, q.shape[0])
        caches = self._caches(inference_params)
        k_cache, v_cache = caches[self.layer_idx][rows].unbind(dim=2)
        return flash_attn_with_kvcache(
            q,
            k_cache,
            v_cache,
            *kv.unbind(dim=2),
            cache_seqlens=self._cached_lengths(q.shape[0], inference_params),
            softmax_scale=inner.softmax_scale,
            causal=inner.causal,
            window_size=inner.window_size,
            alibi_slopes=None if inner.alibi_slopes is None else inner.alibi_slopes.float(),
        )


class MHA(_MultiHead):
    """Multi-head self- or cross-attention.

    num_heads_kv: Hk; None is num_heads.
    cross_attn: keys and values come from another sequence, through Wq and Wkv in place of Wqkv. Not with rotary.
    dropout: of softmax weights, in training.
    layer_idx: key of this layer's cache; generation needs one.
    dwconv: a causal convolution over three tokens, channel by channel, behind the projections.
    rotary_emb_dim: channels of each head that turn, 0 for none; with the arguments of `RotaryEmbedding`.
    use_alibi, window_size: with use_flash_attn only.
    fused_bias_fc: projections are `FusedDense`, which computes the same.
    use_flash_attn: attention by `flash_attn_qkvpacked_func` and its like; otherwise in plain torch.
    return_residual: return (result, x).
    checkpointing: backward recomputes attention.
    """

    def __init__(
        self,
        embed_dim,
        num_heads,
        num_heads_kv=None,
        cross_attn=False,
        qkv_proj_bias=True,
        out_proj_bias=True,
        dropout=0.0,
        softmax_scale=None,
        causal=False,
        layer_idx=None,
        dwconv=False,
        rotary_emb_dim=0,
        rotary_emb_base=10000.0,
        rotary_emb_scale_base=None,
        rotary_emb_interleaved=False,
        use_alibi=False,
        window_size=(-1, -1),
        fused_bias_fc=False,
        use_flash_attn=False,
        return_residual=False,
        checkpointing=False,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        assert num_heads % num_heads_kv == 0, f"num_heads is {num_heads}; num_heads_kv, {num_heads_kv}, must divide it."
        assert embed_dim % num_heads == 0, f"embed_dim is {embed_dim}; num_heads, {num_heads}, must divide it."
        assert not (cross_attn and rotary_emb_dim > 0), (
            f"rotary_emb_dim is {rotary_emb_dim}; with cross_attn it must be 0."
        )
        self.embed_dim = embed_dim
        self.num_heads, self.num_heads_kv = num_heads, num_heads_kv
        self.head_dim = embed_dim // num_heads
        self.cross_attn = cross_attn
        self.dwconv = dwconv
        self.return_residual = return_residual
        rotary = (rotary_emb_dim, rotary_emb_base, rotary_emb_scale_base, rotary_emb_interleaved)
        attention = (rotary, use_alibi, window_size, use_flash_attn, checkpointing, device)
        self._set_up(num_heads, num_heads_kv, causal, layer_idx, dropout, softmax_scale, *attention)

        linear = partial(FusedDense if fused_bias_fc else nn.Linear, device=device, dtype=dtype)
        widths = dict(Wq=embed_dim, Wkv=2 * num_heads_kv * self.head_dim)
        widths = widths if cross_attn else dict(Wqkv=sum(widths.values()))
        for name, width in widths.items():
            setattr(self, name, linear(embed_dim, width, bias=qkv_proj_bias))
        if dwconv:
            packed = not cross_attn and num_heads == num_heads_kv
            widths = widths if cross_attn or packed else dict(Wq=embed_dim, Wkv=2 * num_heads_kv * self.head_dim)
            for name, width in widths.items():
                conv = nn.Conv1d(width, width, kernel_size=3, padding=2, groups=width, device=device, dtype=dtype)
                setattr(self, name.replace("W", "dwconv_"), conv)
        self.out_proj = linear(embed_dim, embed_dim, bias=out_proj_bias)

    def _project(self, x, x_kv, mixer_subset):
        """[qkv], or [q, kv]: projections, through the convolutions if there are any, then split into heads."""
        if self.cross_attn:
            q = self.Wq(x if mixer_subset is None else x[:, mixer_subset])
            kv = self.Wkv(x if x_kv is None else x_kv)
        else:
            assert x_kv is None and mixer_subset is None, (
                "x_kv and mixer_subset need cross_attn=True; build the module with it, or pass None."
            )
            qkv = self.Wqkv(x)
            if not self.dwconv:
                return self._split(qkv)
            if self.num_heads == self.num_heads_kv:
                return self._split(_causal_conv(self.dwconv_qkv, qkv))
            q, kv = qkv.split([self.embed_dim, 2 * self.num_heads_kv * self.head_dim], dim=-1)
        if self.dwconv:
            q, kv = _causal_conv(self.dwconv_q, q), _causal_conv(self.dwconv_kv, kv)
        return self._split_apart(q, kv)

    def forward(
        self,
        x,
        x_kv=None,
        key_padding_mask=None,
        cu_seqlens=None,
        max_seqlen=None,
        mixer_subset=None,
        inference_params=None,
        **kwargs,
    ):
        """x (B,S,E) -> (B,S,E); with cu_seqlens and max_seqlen, flash only: (T,E) -> (T,E).

        x_kv: (B,Sk,E): what keys and values of cross_attn are made of; None is x.
        key_padding_mask: bool (B,S), True = keep; without flash only.
        mixer_subset: cross_attn only: indexes the tokens of x that queries are made for.
        inference_params: `flash_attn.utils.generation.InferenceParams`: append to the layer's cache and attend to it.
            The caller advances seqlen_offset after all layers.
        kwargs: for the inner attention, such as cu_seqlens_k and max_seqlen_k.
        """
        if cu_seqlens is not None:
            assert self.use_flash_attn, "cu_seqlens needs use_flash_attn=True; pass key_padding_mask, or build it so."
            assert max_seqlen is not None, (
                "cu_seqlens was given without max_seqlen; pass the longest sequence's length."
            )
            assert not self.dwconv and self.rotary_emb_dim == 0, (
                "cu_seqlens does not go with dwconv or rotary_emb_dim; pass a padded batch to such a module."
            )
        if key_padding_mask is not None:
            assert not self.use_flash_attn, (
                "key_padding_mask needs use_flash_attn=False; pack the batch with cu_seqlens."
            )
        if inference_params is not None:
            assert key_padding_mask is None and cu_seqlens is None and not self.dwconv, (
                "inference_params does not go with key_padding_mask, cu_seqlens or dwconv; leave those out."
            )
        tensors = self._project(x, x_kv, mixer_subset)
        if not self.use_flash_attn:
            kwargs["key_padding_mask"] = key_padding_mask
        elif cu_seqlens is not None:
            kwargs.update(cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
            if len(tensors) == 2 and not self.cross_attn:
                kwargs = {"cu_seqlens_k": cu_seqlens, "max_seqlen_k": max_seqlen, **kwargs}
        out = self.out_proj(self._attend(tensors, inference_params, **kwargs))
        return (out, x) if self.return_residual else out


def _causal_conv(conv, x):
    """x (B,S,channels) -> the same; a padding of 2 makes the last two outputs look ahead."""
    return conv(x.transpose(1, 2))[..., :-2].transpose(1, 2)


class ParallelMHA(_MultiHead):
    """`MHA` with its heads split over the ranks of process_group; projections are `ColumnParallelLinear` and
    `RowParallelLinear`.

    sequence_parallel: x and the result are split over ranks along their first dim. The other arguments: see `MHA`.
    """

    def __init__(
        self,
        embed_dim,
        num_heads,
        process_group,
        num_heads_kv=None,
        qkv_proj_bias=True,
        out_proj_bias=True,
        dropout=0.0,
        softmax_scale=None,
        causal=False,
        layer_idx=None,
        rotary_emb_dim=0,
        rotary_emb_base=10000.0,
        rotary_emb_scale_base=None,
        rotary_emb_interleaved=False,
        use_alibi=False,
        window_size=(-1, -1),
        use_flash_attn=False,
        checkpointing=False,
        sequence_parallel=True,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        assert embed_dim % num_heads == 0, f"embed_dim is {embed_dim}; num_heads, {num_heads}, must divide it."
        assert num_heads % num_heads_kv == 0, f"num_heads is {num_heads}; num_heads_kv, {num_heads_kv}, must divide it."
        self.embed_dim = embed_dim
        self.num_heads, self.num_heads_kv = num_heads, num_heads_kv
        self.head_dim = embed_dim // num_heads
        self.process_group = process_group
        self.world_size, self.local_rank = dist.get_world_size(process_group), dist.get_rank(process_group)
        self.num_heads_kv_per_rank = get_dim_for_local_rank(num_heads_kv, self.world_size, self.local_rank)
        # Heads that share keys and values stay together.
        group = num_heads // num_heads_kv
        self.num_heads_per_rank = group * self.num_heads_kv_per_rank
        rotary = (rotary_emb_dim, rotary_emb_base, rotary_emb_scale_base, rotary_emb_interleaved)
        attention = (rotary, use_alibi, window_size, use_flash_attn, checkpointing, device)
        heads = (self.num_heads_per_rank, self.num_heads_kv_per_rank)
        self._set_up(*heads, causal, layer_idx, dropout, softmax_scale, *attention)

        common = dict(sequence_parallel=sequence_parallel, device=device, dtype=dtype)
        width, unit = (num_heads + 2 * num_heads_kv) * self.head_dim, (group + 2) * self.head_dim
        self.Wqkv = ColumnParallelLinear(
            embed_dim, width, process_group, bias=qkv_proj_bias, multiple_of=unit, **common
        )
        self.out_proj = RowParallelLinear(
            embed_dim, embed_dim, process_group, bias=out_proj_bias, multiple_of=group * self.head_dim, **common
        )

    def _alibi_slopes(self):
        shares = [
            get_dim_for_local_rank(self.num_heads, self.world_size, rank, self.num_heads // self.num_heads_kv)
            for rank in range(self.local_rank)
        ]
        return get_alibi_slopes(self.num_heads)[sum(shares) :][: self.num_heads_per_rank]

    def forward(self, x, seqlen=None, inference_params=None, **kwargs):
        """x (B,S,E) -> (B,S,E), or (B*S,E) -> (B*S,E) with seqlen = S; with sequence_parallel its rows are split.

        inference_params, kwargs: see `MHA`.
        """
        qkv = self.Wqkv(x)
        if seqlen is not None:
            qkv = qkv.unflatten(0, (-1, seqlen))
        context = self._attend(self._split(qkv), inference_params, **kwargs)
        return self.out_proj(context if seqlen is None else context.flatten(0, 1))
