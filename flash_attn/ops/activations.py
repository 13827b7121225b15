"""Activations with upstream's names, computed in fp32 (fp64 for fp64), results in the dtype of the input.

GELU is the tanh approximation: Hendrycks and Gimpel 2016 (https://arxiv.org/abs/1606.08415). Functions ending in _fwd
and _bwd are one direction each; `*_impl` and swiglu are differentiable. g is the gradient of the result.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def _wide(*tensors):
    """The tensors in the precision that the arithmetic is done in."""
    return [t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors]


def _as(dtype, result):
    """result in dtype, not by a `to` that has nothing to do: torch.compile of torch 2.11 takes the alias for one more
    result of an autograd.Function, and the gradient goes there (https://github.com/pytorch/pytorch/issues/180642)."""
    return result if result.dtype == dtype else result.to(dtype)


def gelu_fwd(x):
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    (wide,) = _wide(x)
    return _as(x.dtype, F.gelu(wide, approximate="tanh"))


def gelu_bwd(g, x):
    """Gradient of x of `gelu_fwd`."""
    wide_g, wide = _wide(g, x)
    slope = math.sqrt(2 / math.pi)
    t = torch.tanh(slope * (wide + 0.044715 * wide**3))
    derivative = 0.5 * (1 + t) + 0.5 * wide * (1 - t * t) * slope * (1 + 3 * 0.044715 * wide**2)
    return (wide_g * derivative).to(x.dtype)


def bias_gelu(y, bias):
    """`gelu_fwd` of y + bias; y (...,N), bias (N)."""
    wide, wide_bias = _wide(y, bias)
    return _as(y.dtype, gelu_fwd(wide + wide_bias))


def bias_gelu_back(g, y, bias):
    """Gradients (of y, of bias) of `bias_gelu`; that of bias is summed over all dims but the last."""
    wide_g, wide, wide_bias = _wide(g, y, bias)
    grad = gelu_bwd(wide_g, wide + wide_bias)
    return grad.to(y.dtype), grad.flatten(0, -2).sum(0).to(bias.dtype)


class GeLUFunction(torch.autograd.Function):
    """`bias_gelu`, recomputed in backward."""

    @staticmethod
    def forward(ctx, input, bias):
        ctx.save_for_backward(input, bias)
        return bias_gelu(input, bias)

    @staticmethod
    def backward(ctx, grad_output):
        return bias_gelu_back(grad_output, *ctx.saved_tensors)


bias_gelu_impl = GeLUFunction.apply


class FastGeLUFunction(torch.autograd.Function):
    """`gelu_fwd`, recomputed in backward."""

    @staticmethod
    def forward(ctx, input):
        ctx.save_for_backward(input)
        return gelu_fwd(input)

    @staticmethod
    def backward(ctx, grad_output):
        return gelu_bwd(grad_output, *ctx.saved_tensors)


fast_gelu_impl = FastGeLUFunction.apply


def relu_bwd(g, x):
    """Gradient of x of relu(x), taking the derivative at 0 as 1."""
    return torch.where(x >= 0, g, torch.zeros((), dtype=g.dtype, device=g.device)).to(x.dtype)


def sqrelu_fwd(x):
    """relu(x)^2."""
    (wide,) = _wide(x)
    return _as(x.dtype, F.relu(wide).square())


def sqrelu_bwd(g, x):
    """Gradient of x of `sqrelu_fwd`."""
    wide_g, wide = _wide(g, x)
    return (2 * wide_g * F.relu(wide)).to(x.dtype)


def swiglu_fwd(x, y):
    """x sigmoid(x) y: Shazeer 2020 (https://arxiv.org/abs/2002.05202)."""
    wide_x, wide_y = _wide(x, y)
    return _as(x.dtype, F.silu(wide_x) * wide_y)


def swiglu_bwd(x, y, g):
    """Gradients (of x, of y) of `swiglu_fwd`."""
    wide_x, wide_y, wide_g = _wide(x, y, g)
    gate = torch.sigmoid(wide_x)
    dx = wide_g * wide_y * gate * (1 + wide_x * (1 - gate))
    return dx.to(x.dtype), (wide_g * wide_x * gate).to(y.dtype)


class SwiGLUFunction(torch.autograd.Function):
    """`swiglu_fwd`, recomputed in backward."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return swiglu_fwd(x, y)

    @staticmethod
    def backward(ctx, dout):
        return swiglu_bwd(*ctx.saved_tensors, dout)


swiglu = SwiGLUFunction.apply
