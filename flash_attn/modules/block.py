"""Transformer blocks, serial and parallel, pre- and post-norm, with upstream's names and state_dict keys."""

from __future__ import annotations

from functools import partial
from typing import Optional

import torch
import torch.nn as nn
from torch import Tensor

from flash_attn.modules.mha import MHA
from flash_attn.modules.mlp import Mlp
from flash_attn.ops.triton.layer_norm import RMSNorm, layer_norm_fn


class StochasticDepth(nn.Module):
    """In training, zeroes whole rows of the first dim with probability p and scales the others by 1 / (1 - p).

    Huang et al. 2016 (https://arxiv.org/abs/1603.09382).
    """

    def __init__(self, p: float):
        super().__init__()
        assert 0 <= p <= 1, f"drop path probability is {p}; it must be in [0, 1]."
        self.p = p

    def forward(self, x):
        if not self.training or self.p == 0:
            return x
        kept = torch.rand(x.shape[0], *[1] * (x.dim() - 1), device=x.device) >= self.p
        return x * kept / (1 - self.p) if self.p < 1 else torch.zeros_like(x)


def _add(branch, residual):
    return branch if residual is None else branch + residual


def _mark(norms, sequence_parallel, mark_shared_params):
    """Attributes that `flash_attn.utils.distributed` looks for on parameters that all ranks share."""
    for parameter in (p for norm in norms for p in norm.parameters()):
        if sequence_parallel:
            parameter._sequence_parallel = True
        if mark_shared_params:
            parameter._shared_params = True


def _check_fused(norm, dropout):
    assert isinstance(norm, (nn.LayerNorm, RMSNorm)) and isinstance(dropout, nn.Dropout), (
        f"fused_dropout_add_ln needs nn.LayerNorm or RMSNorm and nn.Dropout, not {type(norm).__name__} and "
        f"{type(dropout).__name__}; pass those, or fused_dropout_add_ln=False."
    )


class Block(nn.Module):
    """Dropout, residual, norm and mixer, then the same around the MLP.

    mixer_cls, mlp_cls, norm_cls, dropout_cls: called with dim (dropout with its probability). None is MHA with heads
        of 64 channels, and Mlp with four times the channels. mlp_cls=nn.Identity leaves the second half out.
    prenorm: norms come before mixer and MLP, and the residual goes beside the hidden states from block to block.
    resid_dropout1, resid_dropout2, drop_path1, drop_path2: probabilities before the first and second sum.
    fused_dropout_add_ln: dropout, sum and norm through `layer_norm_fn`: the sum is rounded after the norm has read it.
    return_residual: post-norm only: mixer and MLP return (result, what to add it to).
    residual_in_fp32: pre-norm only: the residual is fp32.
    sequence_parallel, mark_shared_params: mark the norms' parameters for `flash_attn.utils.distributed`.
    """

    def __init__(
        self,
        dim,
        mixer_cls=None,
        mlp_cls=None,
        norm_cls=nn.LayerNorm,
        dropout_cls=nn.Dropout,
        prenorm=True,
        resid_dropout1=0.0,
        resid_dropout2=0.0,
        drop_path1=0.0,
        drop_path2=0.0,
        fused_dropout_add_ln=False,
        return_residual=False,
        residual_in_fp32=False,
        sequence_parallel=False,
        mark_shared_params=False,
    ):
        super().__init__()
        assert prenorm or not residual_in_fp32, "residual_in_fp32 needs prenorm=True; pass both, or neither."
        self.prenorm = prenorm
        self.fused_dropout_add_ln = fused_dropout_add_ln
        self.return_residual = return_residual
        self.residual_in_fp32 = residual_in_fp32
        self.mixer = partial(MHA, num_heads=dim // 64)(dim) if mixer_cls is None else mixer_cls(dim)
        self.dropout1 = dropout_cls(resid_dropout1)
        self.drop_path1 = StochasticDepth(drop_path1)
        self.norm1 = norm_cls(dim)
        self.mlp = Mlp(dim, hidden_features=4 * dim) if mlp_cls is None else mlp_cls(dim)
        norms = [self.norm1]
        if not isinstance(self.mlp, nn.Identity):
            self.dropout2 = dropout_cls(resid_dropout2)
            self.drop_path2 = StochasticDepth(drop_path2)
            self.norm2 = norm_cls(dim)
            norms.append(self.norm2)
        if fused_dropout_add_ln:
            _check_fused(self.norm1, self.dropout1)
        _mark(norms, sequence_parallel, mark_shared_params)

    def allocate_inference_cache(self, batch_size, max_seqlen, dtype=None, **kwargs):
        """The mixer's cache for generation."""
        return self.mixer.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)

    def _add_norm(self, hidden, residual, norm, dropout, drop_path):
        """(norm of the sum, the sum) of what a branch gave and the residual."""
        if not self.fused_dropout_add_ln:
            total = _add(drop_path(dropout(hidden)), residual)
            return norm(total.to(norm.weight.dtype)), total.float() if self.residual_in_fp32 else total
        rowscale = None
        if drop_path.p > 0 and self.training:
            rowscale = drop_path(torch.ones(hidden.shape[:-1], device=hidden.device))
        return layer_norm_fn(
            hidden,
            norm.weight,
            norm.bias,
            residual=residual,
            eps=norm.eps,
            dropout_p=dropout.p if self.training else 0.0,
            rowscale=rowscale,
            prenorm=True,
            residual_in_fp32=self.residual_in_fp32,
            zero_centered_weight=getattr(norm, "zero_centered_weight", False),
            is_rms_norm=isinstance(norm, RMSNorm),
        )

    def forward(
        self,
        hidden_states: Tensor,
        residual: Optional[Tensor] = None,
        mixer_subset=None,
        mixer_kwargs=None,
    ):
        """hidden_states (...,dim) -> (hidden_states, residual) with prenorm, else hidden_states.

        residual: what the block before returned; None in the first and without prenorm.
        mixer_subset: rows of the sequence that the mixer's queries and all that follows are made for.
        mixer_kwargs: for the mixer.
        """
        mixer_kwargs = dict(mixer_kwargs or {})
        if mixer_subset is not None:
            mixer_kwargs["mixer_subset"] = mixer_subset
        if not self.prenorm:
            assert residual is None, (
                "residual was given; without prenorm a block takes and returns hidden states only: pass None."
            )
            return self._post_norm(hidden_states, mixer_kwargs)
        hidden_states, residual = self._add_norm(hidden_states, residual, self.norm1, self.dropout1, self.drop_path1)
        hidden_states = self.mixer(hidden_states, **mixer_kwargs)
        if mixer_subset is not None:
            residual = residual[:, mixer_subset]
        if not isinstance(self.mlp, nn.Identity):
            hidden_states, residual = self._add_norm(
                hidden_states, residual, self.norm2, self.dropout2, self.drop_path2
            )
            hidden_states = self.mlp(hidden_states)
        return hidden_states, residual

    def _post_norm(self, hidden_states, mixer_kwargs):
        branch = self.mixer(hidden_states, **mixer_kwargs)
        if self.return_residual:
            branch, hidden_states = branch
        if "mixer_subset" in mixer_kwargs:
            hidden_states = hidden_states[:, mixer_kwargs["mixer_subset"]]
        hidden_states, _ = self._add_norm(branch, hidden_states, self.norm1, self.dropout1, self.drop_path1)
        if not isinstance(self.mlp, nn.Identity):
            branch = self.mlp(hidden_states)
            if self.return_residual:
                branch, hidden_states = branch
            hidden_states, _ = self._add_norm(branch, hidden_states, self.norm2, self.dropout2, self.drop_path2)
        return hidden_states


class ParallelBlock(nn.Module):
    """Mixer and MLP side by side on norms of one sum: GPT-J, GPT-NeoX, PaLM (https://arxiv.org/abs/2204.02311).

    tied_norm: one norm serves both. The other arguments: see `Block`.
    """

    def __init__(
        self,
        dim,
        mixer_cls=None,
        mlp_cls=None,
        norm_cls=nn.LayerNorm,
        dropout_cls=nn.Dropout,
        resid_dropout1=0.0,
        resid_dropout2=0.0,
        tied_norm=False,
        fused_dropout_add_ln=False,
        residual_in_fp32=False,
        sequence_parallel=False,
        mark_shared_params=False,
    ):
        super().__init__()
        self.tied_norm = tied_norm
        self.fused_dropout_add_ln = fused_dropout_add_ln
        self.residual_in_fp32 = residual_in_fp32
        self.mixer = partial(MHA, num_heads=dim // 64)(dim) if mixer_cls is None else mixer_cls(dim)
        self.dropout1 = dropout_cls(resid_dropout1)
        self.norm1 = norm_cls(dim)
        self.mlp = Mlp(dim, hidden_features=4 * dim) if mlp_cls is None else mlp_cls(dim)
        self.dropout2 = dropout_cls(resid_dropout2)
        norms = [self.norm1]
        if not tied_norm:
            self.norm2 = norm_cls(dim)
            norms.append(self.norm2)
        if fused_dropout_add_ln:
            _check_fused(self.norm1, self.dropout1)
            assert resid_dropout1 == resid_dropout2, (
                f"resid_dropout1 is {resid_dropout1} and resid_dropout2 {resid_dropout2}; fused_dropout_add_ln drops "
                "both branches with one probability: pass equal ones."
            )
        _mark(norms, sequence_parallel, mark_shared_params)

    def allocate_inference_cache(self, batch_size, max_seqlen, dtype=None, **kwargs):
        """The mixer's cache for generation."""
        return self.mixer.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)

    def _add_norm(self, hidden1, hidden2, residual):
        """(norm for the mixer, norm for the MLP, the sum); the norms are one tensor where they are tied."""
        norms = [self.norm1] if self.tied_norm else [self.norm1, self.norm2]
        if not self.fused_dropout_add_ln:
            branch = self.dropout1(hidden1) if hidden2 is None else self.dropout1(hidden1) + self.dropout2(hidden2)
            total = _add(branch, residual)
            normed = [norm(total.to(norm.weight.dtype)) for norm in norms]
            return normed[0], normed[-1], total.float() if self.residual_in_fp32 else total
        *normed, total = layer_norm_fn(
            hidden1,
            self.norm1.weight,
            self.norm1.bias,
            residual=residual,
            x1=hidden2,
            weight1=None if self.tied_norm else self.norm2.weight,
            bias1=None if self.tied_norm else self.norm2.bias,
            eps=self.norm1.eps,
            dropout_p=self.dropout1.p if self.training else 0.0,
            prenorm=True,
            residual_in_fp32=self.residual_in_fp32,
            zero_centered_weight=getattr(self.norm1, "zero_centered_weight", False),
            is_rms_norm=isinstance(self.norm1, RMSNorm),
        )
        return normed[0], normed[-1], total

    def forward(
        self,
        hidden_states1: Tensor,
        hidden_states2: Optional[Tensor] = None,
        residual: Optional[Tensor] = None,
        mixer_kwargs=None,
    ):
        """hidden_states1 of the mixer before, hidden_states2 of its MLP, residual -> the same three, all (...,dim).

        In the first block hidden_states1 is the embedding and the other two are None.
        """
        for_mixer, for_mlp, residual = self._add_norm(hidden_states1, hidden_states2, residual)
        return self.mixer(for_mixer, **(mixer_kwargs or {})), self.mlp(for_mlp), residual
