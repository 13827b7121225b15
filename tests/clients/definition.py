"""What the replayed calls are compared with: attention from its definition, and partial attention put together."""

from __future__ import annotations

import math

import torch
from plain_attention import attend


def scores(q, k, visible=None, scale=None):
    """Natural log of the softmax denominator, (B,H,Sq), of q (B,Sq,H,D) over k (B,Sk,Hk,D)."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return (s if visible is None else s.masked_fill(~visible, -math.inf)).logsumexp(-1)


def differentiated(tensors, dout, visible=None, scale=None):
    """[out, dq, dk, dv] in fp64 from the definition."""
    leaves = [x.detach().double().requires_grad_() for x in tensors]
    out = attend(*leaves, visible=visible, scale=scale)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.double())]


def merge(out, lse, part, part_lse):
    """Softmax-weighted sum of two partial results over different keys. out (...,S,H,D), lse (...,H,S); FlashAttention-2
    gives +inf for a row without keys, which counts as nothing."""
    lse, part_lse = (x.masked_fill(x == math.inf, -math.inf) for x in (lse, part_lse))
    total = torch.logaddexp(lse, part_lse)
    mine, other = ((x - total).exp().transpose(-1, -2).unsqueeze(-1) for x in (lse, part_lse))
    return out * mine + part * other, total


def assert_near(got, wanted, tolerance=2e-5):
    assert got.shape == wanted.shape
    error = (got.double() - wanted.double()).abs().max().item()
    assert error <= tolerance * (1 + wanted.abs().max().item()), error
