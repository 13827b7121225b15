"""Analytic gradients against finite differences in fp64, through torch's own checker and without the oracle."""

from __future__ import annotations

import pytest
import torch

import flash_attn
from flash_attn import flash_attn_interface as interface

pytestmark = pytest.mark.second_torch

SETTINGS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "softcap": {"softcap": 0.8},
    "alibi": {"alibi_slopes": torch.tensor([[0.2, 0.9], [0.4, 0.1]])},
    "dropout": {"dropout_p": 0.4},
    "negative scale": {"softmax_scale": -0.6},
    "softcap causal alibi": {"softcap": 1.1, "causal": True, "alibi_slopes": torch.tensor([0.3, 0.6])},
    "window dropout": {"window_size": (1, 2), "dropout_p": 0.3, "deterministic": True},
}


def leaf(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def gradcheck(function, leaves):
    def call(*args):
        torch.manual_seed(2)  # one dropout mask for all evaluations
        return function(*args)

    assert torch.autograd.gradcheck(call, leaves, eps=1e-6, atol=1e-7, rtol=1e-5, nondet_tol=0.0)


@pytest.mark.feature("dense forward", "dense backward", dtype="fp64")
@pytest.mark.parametrize("Sq, Sk", [(3, 5), (5, 3), (1, 4)])
@pytest.mark.parametrize("name", list(SETTINGS))
def test_dense(name, Sq, Sk):
    leaves = (leaf(2, Sq, 2, 3), leaf(2, Sk, 1, 3, seed=1), leaf(2, Sk, 1, 2, seed=2))
    gradcheck(lambda q, k, v: flash_attn.flash_attn_func(q, k, v, **SETTINGS[name]), leaves)


@pytest.mark.feature("varlen forward", "varlen backward", dtype="fp64")
@pytest.mark.parametrize("name", list(SETTINGS))
def test_varlen(name):
    cu_q, cu_k = torch.tensor([0, 3, 8], dtype=torch.int32), torch.tensor([0, 5, 6], dtype=torch.int32)
    leaves = (leaf(8, 2, 3), leaf(6, 2, 3, seed=1), leaf(6, 2, 3, seed=2))
    gradcheck(lambda q, k, v: flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 5, **SETTINGS[name]), leaves)


@pytest.mark.feature("packed qkv and kv forward", "packed qkv and kv backward", dtype="fp64")
@pytest.mark.parametrize("name", list(SETTINGS))
def test_packed(name):
    kwargs, cu = SETTINGS[name], torch.tensor([0, 3, 7], dtype=torch.int32)
    gradcheck(lambda qkv: flash_attn.flash_attn_qkvpacked_func(qkv, **kwargs), (leaf(2, 4, 3, 2, 3),))
    gradcheck(
        lambda q, kv: flash_attn.flash_attn_kvpacked_func(q, kv, **kwargs), (leaf(2, 3, 2, 3), leaf(2, 4, 2, 1, 3))
    )
    gradcheck(lambda x: flash_attn.flash_attn_varlen_qkvpacked_func(x, cu, 4, **kwargs), (leaf(7, 3, 2, 3),))
    gradcheck(
        lambda q, kv: flash_attn.flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 4, 4, **kwargs),
        (leaf(7, 2, 3), leaf(7, 2, 1, 3)),
    )


def test_across_key_blocks():
    """Finite differences along random directions, where every single element would take hours."""
    q, k, v = leaf(1, 40, 2, 8), leaf(1, 1100, 1, 8, seed=1), leaf(1, 1100, 1, 8, seed=2)
    dout = leaf(1, 40, 2, 8, seed=3).detach()

    def loss(*args):
        torch.manual_seed(2)
        return (flash_attn.flash_attn_func(*args, causal=True, window_size=(900, 0), dropout_p=0.2) * dout).sum()

    grads = torch.autograd.grad(loss(q, k, v), (q, k, v))
    for seed in range(4, 9):
        directions = [leaf(*x.shape, seed=seed).detach() for x in (q, k, v)]
        sides = [loss(*(x + h * d for x, d in zip((q, k, v), directions))) for h in (1e-5, -1e-5)]
        slope = (sides[0] - sides[1]) / 2e-5
        assert abs(sum((g * d).sum() for g, d in zip(grads, directions)) - slope) < 1e-6 * (1 + abs(slope))


def test_foreign_lse_in_the_raw_backward():
    """Ring attention: with the LSE of a longer row, backward over one block of keys gives that block's exact share."""
    q, k, v = leaf(1, 20, 2, 8).detach(), leaf(1, 60, 2, 8, seed=1).detach(), leaf(1, 60, 2, 8, seed=2).detach()
    dout = leaf(1, 20, 2, 8, seed=3).detach()
    score = (0.0, 0.3, False, -1, -1, 0.0, None)
    out, lse, _, _ = interface._flash_attn_forward(q, k, v, *score, False)
    whole = [torch.empty_like(x) for x in (q, k, v)]
    interface._flash_attn_backward(dout, q, k, v, out, lse, *whole, *score, False)
    dq = torch.zeros_like(q)
    for block in (slice(0, 25), slice(25, 60)):
        part = [torch.empty_like(x) for x in (q, k[:, block], v[:, block])]
        interface._flash_attn_backward(dout, q, k[:, block], v[:, block], out, lse, *part, *score, False)
        dq += part[0]
        torch.testing.assert_close(part[1], whole[1][:, block], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(part[2], whole[2][:, block], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(dq, whole[0], rtol=1e-10, atol=1e-12)
