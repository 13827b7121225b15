"""Layer norm and RMS norm of a sum, in one call, with upstream's names. Plain torch, differentiable."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from flash_attn.ops._add_norm import add_norm, like, per_row


def _shifted(weight):
    """A weight that is kept minus 1: in fp32, as next to 1 those of 16 bits would lose what is below 2^-8."""
    return None if weight is None else weight.to(torch.promote_types(weight.dtype, torch.float32)) + 1.0


def _written(name, out, y):
    """y, in the memory of `out` where that is given."""
    if out is None:
        return y
    like(name, out, y)
    return like(name, out.copy_(like("x", y, out)), y)


def layer_norm_fn(
    x,
    weight,
    bias,
    residual=None,
    x1=None,
    weight1=None,
    bias1=None,
    eps=1e-6,
    dropout_p=0.0,
    rowscale=None,
    prenorm=False,
    residual_in_fp32=False,
    zero_centered_weight=False,
    is_rms_norm=False,
    return_dropout_mask=False,
    out_dtype=None,
    out=None,
    residual_out=None,
):
    """Normalizes s = dropout(x * rowscale) + dropout(x1) + residual over the last dim; computed in fp32.

    x: (...,N). x1, residual: the same shape, or None.
    weight, bias: (N); bias may be None. weight1, bias1: (N) of a second norm of the same sum, or None.
    rowscale: as many numbers as x has rows, or None; not with x1.
    dropout_p: in [0, 1), as it is given: there is no training mode here.
    prenorm: also return s, in residual's dtype or, without residual, in fp32 with residual_in_fp32, else in x's dtype.
    zero_centered_weight: the weights are kept minus 1.
    return_dropout_mask: also return the bool masks of x and x1, true where an element stays. None without dropout, and
        for x1 without x1.
    out_dtype: of the results; None is x's, or that of out.
    out, residual_out: tensors to write the first result and s into, of as many rows as x.

    Returns y, then y1 with weight1, s with prenorm, two masks with return_dropout_mask; alone if it is only y.
    """
    for name, other in (("residual", residual), ("x1", x1)):
        assert other is None or other.shape == x.shape, (
            f"{name} has shape {tuple(other.shape)} and x {tuple(x.shape)}; they must be equal."
        )
    assert rowscale is None or x1 is None, (
        "rowscale and x1 were given, and rowscale would scale x only: pass one of them."
    )
    assert bias1 is None or weight1 is not None, "bias1 was given without weight1, whose norm it is for: pass both."
    assert out is None or out_dtype in (None, out.dtype), (
        f"out has dtype {out.dtype} and out_dtype is {out_dtype}; pass one of them, or equal ones."
    )
    if out is not None:
        out_dtype = out.dtype
    if zero_centered_weight:
        weight, weight1 = _shifted(weight), _shifted(weight1)
    norms = [(weight, bias)] + ([] if weight1 is None else [(weight1, bias1)])
    branches = [x] if x1 is None else [x, x1]
    scales = [] if rowscale is None else [per_row(rowscale, x)]
    results, total, masks = add_norm(
        branches, residual, norms, eps, dropout_p, scales, residual_in_fp32, is_rms_norm, out_dtype
    )
    results[0] = _written("out", out, results[0])
    total = _written("residual_out", residual_out, total)
    if prenorm:
        results.append(total)
    if return_dropout_mask:
        masks = masks if dropout_p > 0 else ()
        results.extend([*masks, None, None][:2])
    return results[0] if len(results) == 1 else tuple(results)


def rms_norm_fn(
    x,
    weight,
    bias,
    residual=None,
    x1=None,
    weight1=None,
    bias1=None,
    eps=1e-6,
    dropout_p=0.0,
    rowscale=None,
    prenorm=False,
    residual_in_fp32=False,
    zero_centered_weight=False,
    return_dropout_mask=False,
    out_dtype=None,
    out=None,
    residual_out=None,
):
    """`layer_norm_fn` with the root mean square in place of mean and variance."""
    return layer_norm_fn(
        x,
        weight,
        bias,
        residual,
        x1,
        weight1,
        bias1,
        eps,
        dropout_p,
        rowscale,
        prenorm,
        residual_in_fp32,
        zero_centered_weight,
        True,
        return_dropout_mask,
        out_dtype,
        out,
        residual_out,
    )


class RMSNorm(torch.nn.Module):
    """RMS norm of dropout(x) + residual, dropout in training only. zero_centered_weight: the weight is kept minus 1."""

    def __init__(self, hidden_size, eps=1e-5, dropout_p=0.0, zero_centered_weight=False, device=None, dtype=None):
        super().__init__()
        self.eps = eps
        self.drop = torch.nn.Dropout(dropout_p) if dropout_p > 0.0 else None
        self.zero_centered_weight = zero_centered_weight
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self):
        torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered_weight else 1.0)

    def forward(self, x, residual=None, prenorm=False, residual_in_fp32=False):
        """x, residual (...,N) -> y, or (y, sum) with prenorm; see `layer_norm_fn`."""
        return rms_norm_fn(
            x,
            self.weight,
            self.bias,
            residual=residual,
            eps=self.eps,
            dropout_p=self.drop.p if self.drop is not None and self.training else 0.0,
            prenorm=prenorm,
            residual_in_fp32=residual_in_fp32,
            zero_centered_weight=self.zero_centered_weight,
        )


def layer_norm_linear_fn(
    x,
    norm_weight,
    norm_bias,
    linear_weight,
    linear_bias,
    residual=None,
    eps=1e-6,
    prenorm=False,
    residual_in_fp32=False,
    is_rms_norm=False,
):
    """Norm of x + residual (...,N), then a linear layer: linear_weight (M,N), linear_bias (M) or None -> (...,M).

    The linear layer runs in x's dtype, or in autocast's. With prenorm also returns the sum, as `layer_norm_fn` does.
    """
    y, total = layer_norm_fn(
        x,
        norm_weight,
        norm_bias,
        residual,
        eps=eps,
        prenorm=True,
        residual_in_fp32=residual_in_fp32,
        is_rms_norm=is_rms_norm,
    )
    bias = None if linear_bias is None else linear_bias.to(y.dtype)
    out = F.linear(y, linear_weight.to(y.dtype), bias)
    return (out, total) if prenorm else out
