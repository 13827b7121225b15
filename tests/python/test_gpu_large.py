"""Real sizes on a real GPU: lengths to 16k, and tensors of more than 2^31 elements."""

from __future__ import annotations

import math

import pytest
import torch

import flash_attn

pytestmark = [pytest.mark.gpu, pytest.mark.skipif("config.getoption('device') != 'cuda'", reason="needs a real GPU")]


def plain(q, k, v, causal, scale):
    """softmax(scale * q k^T) v of one head: (Sq, D), (Sk, D), (Sk, Dv), in their precision."""
    scores = (q @ k.T) * scale
    if causal:
        Sq, Sk = scores.shape
        hidden = torch.ones(Sq, Sk, dtype=torch.bool, device=q.device).triu(1 + Sk - Sq)
        # A row that sees no key is all zeros in the end, and finite until then.
        empty = hidden[:, :1]
        return (scores.masked_fill(hidden & ~empty, -math.inf).softmax(-1) * ~empty) @ v
    return scores.softmax(-1) @ v


def check_head(got, given, causal):
    """The contract's rule for out, dq, dk and dv of one head, from its q, k, v and dout."""
    *inputs, dout = given

    def results(dtype):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = plain(*leaves, causal, inputs[0].shape[-1] ** -0.5)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))]

    exact, same = results(torch.float64), results(dout.dtype)
    for multiple, ours, theirs, reference in zip((2, 3, 3, 3), got, same, exact):
        error, allowed = ((x.double() - reference).abs().max().item() for x in (ours, theirs))
        assert error <= multiple * allowed, (error, allowed)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("Sq, Sk", [(2048, 2048), (4096, 8191), (8192, 4099), (16384, 16384)])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_long(dtype, D, Sq, Sk, causal):
    torch.manual_seed(0)
    q, dout = (torch.randn(1, Sq, 2, D, device="cuda", dtype=dtype) for _ in range(2))
    k, v = (torch.randn(1, Sk, 2, D, device="cuda", dtype=dtype) for _ in range(2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attn.flash_attn_func(*leaves, causal=causal)
    grads = torch.autograd.grad(out, leaves, dout)
    for h in range(2):
        check_head([x[0, :, h].detach() for x in (out, *grads)], [x[0, :, h].detach() for x in (*leaves, dout)], causal)


def test_more_elements_than_32_bits_count():
    """q, k, v and all results have 2.4e9 elements; heads at both ends and past 2^31 are right."""
    B, S, H, D = 9, 16384, 128, 128
    assert B * S * H * D > 2**31
    torch.manual_seed(0)
    leaves = [torch.randn(B, S, H, D, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    dout = torch.randn(B, S, H, D, device="cuda", dtype=torch.bfloat16)
    out = flash_attn.flash_attn_func(*leaves, causal=True)
    grads = torch.autograd.grad(out, leaves, dout)
    for b, h in ((0, 0), (4, 77), (7, 127), (8, 0), (8, 127)):
        check_head([x[b, :, h].detach() for x in (out, *grads)], [x[b, :, h].detach() for x in (*leaves, dout)], True)


def test_rows_far_apart():
    """Rows 2^25 elements apart and packed sequences whose last rows lie past 2^31 elements."""
    S, H, D = 80, 2, 64
    torch.manual_seed(0)
    whole = torch.zeros(S << 25, device="cuda", dtype=torch.bfloat16)
    view = whole.as_strided((1, S, H, D), (0, 1 << 25, D, 1))
    near = torch.randn(1, S, H, D, device="cuda", dtype=torch.bfloat16)
    view.copy_(near)
    results = []
    for x in (near, view):
        x = x.detach().requires_grad_()
        out = flash_attn.flash_attn_func(x, x, x, causal=True)
        results.append((out, *torch.autograd.grad(out, x, torch.ones_like(out))))
    for a, b in zip(*results):
        assert torch.allclose(a.float(), b.float(), atol=2e-2)
    cu = torch.tensor([0, 40, S], device="cuda", dtype=torch.int32)
    packed = [flash_attn.flash_attn_varlen_func(x[0], x[0], x[0], cu, cu, 40, 40) for x in (near, view)]
    assert torch.allclose(*(x.float() for x in packed), atol=2e-2)
