"""Dropout, residual and RMS norm in one call, with upstream's names; see `flash_attn.ops.layer_norm` for the rules."""

from __future__ import annotations

import torch

from flash_attn.ops._add_norm import normalize
from flash_attn.ops.layer_norm import (
    dropout_add_norm,
    dropout_add_norm_parallel_residual,
    dropout_add_norm_subset,
)


def rms_norm(x, weight, epsilon):
    """RMS norm of x (...,N) with weight (N)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return normalize(wide, weight, None, epsilon, is_rms_norm=True).to(x.dtype)


def dropout_add_rms_norm(
    x0,
    residual,
    weight,
    bias,
    dropout_p,
    epsilon,
    rowscale=None,
    layerscale=None,
    prenorm=False,
    residual_in_fp32=False,
    return_dropout_mask=False,
):
    """`dropout_add_layer_norm` with the RMS norm; bias may be None."""
    options = (rowscale, layerscale, prenorm, residual_in_fp32, return_dropout_mask)
    return dropout_add_norm(x0, residual, weight, bias, dropout_p, epsilon, *options, is_rms_norm=True)


def dropout_add_rms_norm_subset(
    x0,
    residual,
    weight,
    bias,
    dropout_p,
    epsilon,
    layerscale=None,
    x0_subset=None,
    out_subset=None,
    rowscale_const=1.0,
    out_numrows=0,
    prenorm=False,
    residual_in_fp32=False,
    return_dropout_mask=False,
):
    """`dropout_add_layer_norm_subset` with the RMS norm; bias may be None."""
    options = (layerscale, x0_subset, out_subset, rowscale_const, out_numrows, prenorm, residual_in_fp32)
    options += (return_dropout_mask, True)
    return dropout_add_norm_subset(x0, residual, weight, bias, dropout_p, epsilon, *options)


def dropout_add_rms_norm_parallel_residual(
    x0,
    x1,
    residual,
    weight0,
    bias0,
    weight1,
    bias1,
    dropout_p,
    epsilon,
    prenorm=False,
    residual_in_fp32=False,
    return_dropout_mask=False,
):
    """`dropout_add_layer_norm_parallel_residual` with the RMS norm; biases may be None."""
    norms = (weight0, bias0, weight1, bias1)
    options = (dropout_p, epsilon, prenorm, residual_in_fp32, return_dropout_mask)
    return dropout_add_norm_parallel_residual(x0, x1, residual, *norms, *options, is_rms_norm=True)


class DropoutAddRMSNorm(torch.nn.Module):
    """`dropout_add_rms_norm` with its weight, without bias; dropout with probability p in training only."""

    def __init__(self, hidden_size, prenorm=False, p=0.0, eps=1e-5, residual_in_fp32=False, device=None, dtype=None):
        super().__init__()
        self.prenorm = prenorm
        self.p = p
        self.eps = eps
        self.residual_in_fp32 = residual_in_fp32
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self):
        torch.nn.init.ones_(self.weight)

    def forward(self, x0, residual=None):
        """x0, residual (...,N) -> y, or (y, sum) with prenorm."""
        p = self.p if self.training else 0.0
        options = dict(prenorm=self.prenorm, residual_in_fp32=self.residual_in_fp32)
        return dropout_add_rms_norm(x0, residual, self.weight, self.bias, p, self.eps, **options)


class RMSNorm(torch.nn.Module):
    """`rms_norm` with its weight."""

    def __init__(self, hidden_size, eps=1e-5, device=None, dtype=None):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self):
        torch.nn.init.ones_(self.weight)

    def forward(self, x):
        """x (...,N) -> (...,N)."""
        return rms_norm(x, self.weight, self.eps)
