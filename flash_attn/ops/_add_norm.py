"""Sum of branches and residual, then layer norm or RMS norm: what every norm function of this package is made of.

LayerNorm: Ba et al. 2016 (https://arxiv.org/abs/1607.06450); RMSNorm: Zhang and Sennrich 2019
(https://arxiv.org/abs/1910.07467). Letters: N features, ... the dims before them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def dropped(x, p):
    """(x with elements zeroed with probability p and the others scaled by 1 / (1 - p), mask of those that stay)."""
    if not 0 <= p < 1:
        raise ValueError(f"dropout_p is {p}; it must be in [0, 1).")
    if p == 0:
        return x, torch.ones_like(x, dtype=torch.bool)
    mask = torch.rand(x.shape, device=x.device) >= p
    return x * mask / (1 - p), mask


def normalize(x, weight, bias, eps, is_rms_norm=False):
    """Norm over the last dim in x's dtype. weight, bias (N) may be None."""
    weight, bias = (t if t is None else t.to(x.dtype) for t in (weight, bias))
    if not is_rms_norm:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def like(name, tensor, x, x_name="x"):
    """The tensor in the shape of x (...,N), whose elements it has in other dims before the last; None stays None."""
    assert tensor is None or (tensor.shape[-1:] == x.shape[-1:] and tensor.numel() == x.numel()), (
        f"{name} has shape {tuple(tensor.shape)} and {x_name} {tuple(x.shape)}; they must have the same rows."
    )
    return tensor if tensor is None or tensor.shape == x.shape else tensor.reshape(x.shape)


def per_row(rowscale, x):
    """What each row of x (...,N) is multiplied by: (...,1). rowscale: one number a row, in any shape."""
    rows = x.shape[:-1]
    assert rowscale.numel() == rows.numel(), (
        f"rowscale has shape {tuple(rowscale.shape)}; it must have {rows.numel()} elements, one for each row of x."
    )
    return rowscale.reshape(rows)[..., None]


def check_features(name, tensor, x):
    """That the tensor has one number for each feature of x (...,N)."""
    N = x.shape[-1]
    assert tensor is None or tensor.shape == (N,), (
        f"{name} has shape {tuple(tensor.shape)}; it must be ({N},), the last dim of x."
    )


def add_norm(
    branches,
    residual,
    norms,
    eps,
    dropout_p=0.0,
    scales=(),
    residual_in_fp32=False,
    is_rms_norm=False,
    out_dtype=None,
):
    """Normalizes dropout(branch * scales) + ... + residual.

    branches: tensors (...,N) of one dtype, the first with scales applied.
    residual: (...,N) or None.
    norms: one (weight, bias) for each result.
    scales: tensors that broadcast to (...,N).
    residual_in_fp32: dtype of the sum where there is no residual, whose dtype it has otherwise.
    out_dtype: of the results; None is that of the branches.

    Computes in fp32 (fp64 for fp64). Returns (results, sum, dropout masks); results see the sum before its rounding.
    """
    for n, (weight, bias) in enumerate(norms):
        check_features(f"weight{n or ''}", weight, branches[0])
        check_features(f"bias{n or ''}", bias, branches[0])
    own = branches[0].dtype
    dtype = torch.promote_types(own, torch.float32)
    parts = [branch.to(dtype) for branch in branches]
    for scale in scales:
        parts[0] = parts[0] * scale
    parts, masks = zip(*(dropped(part, dropout_p) for part in parts))
    total = sum(parts[1:], parts[0])
    kept_in = dtype if residual_in_fp32 else own
    if residual is not None:
        total, kept_in = total + residual, residual.dtype
    results = [normalize(total, weight, bias, eps, is_rms_norm).to(out_dtype or own) for weight, bias in norms]
    return results, total.to(kept_in), masks
