"""Rotation of channel pairs from its definition: multiplication of complex numbers in double precision."""

import math

import torch

HALF = (torch.float16, torch.bfloat16)


def tables(positions, rotary_dim, dtype=torch.float32):
    """cos and sin of random angles: no two positions or pairs alike."""
    angles = 2 * math.pi * torch.rand(positions, rotary_dim // 2, dtype=torch.float64)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def expected(x, cos, sin, positions, interleaved, conjugate=False):
    """x (...,S,H,D) with row s at positions (...,S), in fp64; rows without a table row stay."""
    x, cos, sin = x.double(), cos.double(), sin.double()
    R = 2 * cos.shape[-1]
    factors = torch.complex(cos, -sin if conjugate else sin)
    there = (positions >= 0) & (positions < len(cos))
    factors = torch.where(
        there[..., None], factors[positions.clamp(0, len(cos) - 1)], torch.ones((), dtype=factors.dtype)
    )
    first, second = (range(0, R, 2), range(1, R, 2)) if interleaved else (range(R // 2), range(R // 2, R))
    turned = torch.complex(x[..., list(first)], x[..., list(second)]) * factors.unsqueeze(-2)
    out = x.clone()
    out[..., list(first)], out[..., list(second)] = turned.real, turned.imag
    return out


def assert_near(actual, reference):
    """The contract's rule: the tolerance is the rounding of the dtype at the size of the values."""
    rounded = reference.to(actual.dtype)
    atol = 2 * ((rounded + 0.3 - 0.3) - rounded).abs().max().item()
    torch.testing.assert_close(actual.double(), reference, rtol=1e-3 if actual.dtype in HALF else 1e-6, atol=atol)
