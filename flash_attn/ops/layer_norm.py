"""Dropout, residual and layer norm in one call, with upstream's names. Plain torch, differentiable, on every device.

Letters: N features, ... the dims before them. All of these compute in fp32 and return results in x0's dtype. The sum
has residual's dtype or, without residual, fp32 with residual_in_fp32, else x0's. Dropout happens where dropout_p > 0;
its masks are uint8, 1 where an element stays.
"""

from __future__ import annotations

import torch

from flash_attn.ops._add_norm import add_norm, check_features, like, normalize, per_row


def layer_norm(x, weight, bias, epsilon):
    """Layer norm of x (...,N) with weight, bias (N)."""
    return normalize(x.to(torch.promote_types(x.dtype, torch.float32)), weight, bias, epsilon).to(x.dtype)


def _collect(results, total, masks, prenorm, return_dropout_mask):
    """Results, then the sum, then masks, where they are asked for; alone if it is one tensor."""
    items = [*results, *([total] if prenorm else [])]
    items += [mask.to(torch.uint8) for mask in masks] if return_dropout_mask else []
    return items[0] if len(items) == 1 else tuple(items)


def dropout_add_norm(
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
    is_rms_norm=False,
):
    """`dropout_add_layer_norm` with the choice of the norm."""
    check_features("layerscale", layerscale, x0)
    scales = [] if rowscale is None else [per_row(rowscale, x0)]
    scales += [] if layerscale is None else [layerscale]
    residual = like("residual", residual, x0, "x0")
    norms = [(weight, bias)]
    done = add_norm([x0], residual, norms, epsilon, dropout_p, scales, residual_in_fp32, is_rms_norm)
    return _collect(*done, prenorm, return_dropout_mask)


def dropout_add_layer_norm(
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
    """Layer norm of dropout(x0 * rowscale * layerscale) + residual.

    x0, residual: (...,N); residual may be None. weight, bias, layerscale: (N). rowscale: one number for each row.
    Returns y, then the sum with prenorm, then the mask with return_dropout_mask; alone if it is only y.
    """
    options = (rowscale, layerscale, prenorm, residual_in_fp32, return_dropout_mask)
    return dropout_add_norm(x0, residual, weight, bias, dropout_p, epsilon, *options)


def dropout_add_norm_subset(
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
    is_rms_norm=False,
):
    """`dropout_add_layer_norm_subset` with the choice of the norm."""
    check_features("layerscale", layerscale, x0)
    N = x0.shape[-1]
    shape = x0.shape if x0_subset is None else (*x0_subset.shape, N)
    rows = x0.reshape(-1, N)
    scales = [torch.as_tensor(rowscale_const, device=x0.device, dtype=torch.promote_types(x0.dtype, torch.float32))]
    scales += [] if layerscale is None else [layerscale]
    if x0_subset is not None:
        rows = torch.cat((torch.zeros_like(rows[:1]), rows))[x0_subset.flatten().long()]
    residual = like("residual", residual, rows, "x0")
    norms = [(weight, bias)]
    (y,), total, masks = add_norm([rows], residual, norms, epsilon, dropout_p, scales, residual_in_fp32, is_rms_norm)
    if x0_subset is not None:
        taken = torch.zeros(x0.numel() // N + 1, N, dtype=torch.bool, device=x0.device)
        masks = [taken.index_put((x0_subset.flatten().long(),), masks[0])[1:].view(x0.shape)]
    if out_subset is not None:
        wanted = y.new_zeros(out_numrows + 1, N)
        y = wanted.index_put((out_subset.flatten().long(),), y)[1:].view(-1, *x0.shape[1:])
    else:
        y = y.view(shape)
    return _collect([y], total.view(shape), masks, prenorm, return_dropout_mask)


def dropout_add_layer_norm_subset(
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
    """Layer norm of dropout(x0 * rowscale_const * layerscale) + residual; rows of x0 or of the result are left out.

    x0: (rows kept,N) with x0_subset, else (...,N). residual: (...,N) or None.
    x0_subset: int (...): row r of the sum gets row x0_subset[r] - 1 of x0, and nothing where it is 0.
    out_subset: int (...): row r of the sum makes row out_subset[r] - 1 of the result, which has out_numrows rows, and
        none where it is 0.
    Returns as `dropout_add_layer_norm`; the sum is (...,N), the mask has x0's shape.
    """
    options = (layerscale, x0_subset, out_subset, rowscale_const, out_numrows, prenorm, residual_in_fp32)
    return dropout_add_norm_subset(x0, residual, weight, bias, dropout_p, epsilon, *options, return_dropout_mask)


def dropout_add_norm_parallel_residual(
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
    is_rms_norm=False,
):
    """`dropout_add_layer_norm_parallel_residual` with the choice of the norm."""
    assert bias1 is None or weight1 is not None, "bias1 was given without weight1, whose norm it is for: pass both."
    branches = [x0] if x1 is None else [x0, like("x1", x1, x0, "x0")]
    residual = like("residual", residual, x0, "x0")
    norms = [(weight0, bias0)] + ([] if weight1 is None else [(weight1, bias1)])
    results, total, masks = add_norm(branches, residual, norms, epsilon, dropout_p, (), residual_in_fp32, is_rms_norm)
    items = [*results, *([None] if weight1 is None else []), *([total] if prenorm else [])]
    if return_dropout_mask:
        items += [mask.to(torch.uint8) for mask in masks]
        items += [torch.ones_like(x0, dtype=torch.uint8)] if x1 is None else []
    return tuple(items)


def dropout_add_layer_norm_parallel_residual(
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
    """Two layer norms of dropout(x0) + dropout(x1) + residual, all (...,N); x1 and residual may be None.

    Returns (y0, y1), then the sum with prenorm, then both masks with return_dropout_mask. y1 is None without weight1,
    the second mask is all ones without x1.
    """
    norms = (weight0, bias0, weight1, bias1)
    options = (dropout_p, epsilon, prenorm, residual_in_fp32, return_dropout_mask)
    return dropout_add_norm_parallel_residual(x0, x1, residual, *norms, *options)


class DropoutAddLayerNorm(torch.nn.Module):
    """`dropout_add_layer_norm` with its weight and bias; dropout with probability p in training only."""

    def __init__(self, hidden_size, prenorm=False, p=0.0, eps=1e-5, residual_in_fp32=False, device=None, dtype=None):
        super().__init__()
        self.prenorm = prenorm
        self.p = p
        self.eps = eps
        self.residual_in_fp32 = residual_in_fp32
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self):
        torch.nn.init.ones_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, x0, residual=None):
        """x0, residual (...,N) -> y, or (y, sum) with prenorm."""
        p = self.p if self.training else 0.0
        options = dict(prenorm=self.prenorm, residual_in_fp32=self.residual_in_fp32)
        return dropout_add_layer_norm(x0, residual, self.weight, self.bias, p, self.eps, **options)
