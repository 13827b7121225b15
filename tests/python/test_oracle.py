"""The references themselves: against torch's own attention, finite differences, and published vectors."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import oracle
import philox
import pytest
import torch

PUBLISHED = [
    # Known answers of philox4x32-10 distributed with Random123: counter, key, result.
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("counter, key, words", PUBLISHED)
def test_philox_published_vectors(counter, key, words):
    assert tuple(int(w) for w in philox.philox4x32(counter, key)) == words


def test_mask_elements_one_by_one():
    """The vectorised mask equals the rule written for one element."""
    seed, offset, p = -0x123456789ABCDEF0, 0x0FEDCBA987654321, 0.3
    mask = philox.keep_mask((seed, offset), p, 2, 3, 5, 150)
    subkey = philox.philox4x32(
        (offset & 0xFFFFFFFF, offset >> 32, 0, 0), (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    )[:2]
    for b, h, i, j in [(0, 0, 0, 0), (1, 2, 4, 149), (1, 0, 3, 63), (0, 2, 1, 64), (1, 1, 2, 17), (0, 1, 4, 130)]:
        words = philox.philox4x32(((j // 64) * 4 + j // 4 % 4, i, b, h), [int(w) for w in subkey])
        byte = int(words[j // 16 % 4]) >> (8 * (j % 4)) & 255
        assert bool(mask[b, h, i, j]) == (byte <= math.floor(255 * (1 - p)))


def test_bytes_are_uniform():
    counts = np.bincount(philox.random_bytes((7, 0), 2, 2, 128, 512).ravel(), minlength=256)
    expected = counts.sum() / 256
    assert ((counts - expected) ** 2 / expected).sum() < 350  # chi-square, 255 degrees of freedom: p about 1e-4


def _inputs(B, Sq, Sk, H, Hk, D, Dv):
    g = torch.Generator().manual_seed(0)
    return [
        torch.randn(s, generator=g, dtype=torch.float64)
        for s in ((B, Sq, H, D), (B, Sk, Hk, D), (B, Sk, Hk, Dv), (B, Sq, H, Dv))
    ]


@pytest.mark.parametrize("mask", [False, True])
def test_oracle_agrees_with_torch(mask):
    q, k, v, dout = _inputs(2, 7, 7, 4, 2, 5, 3)
    got = oracle.run(q, k, v, dout, oracle.Score(causal=mask))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    heads = [leaves[0].transpose(1, 2)] + [x.transpose(1, 2).repeat_interleave(2, 1) for x in leaves[1:]]
    s = heads[0] @ heads[1].transpose(-1, -2) / math.sqrt(5)
    if mask:
        s = s + torch.triu(torch.full((7, 7), -math.inf, dtype=torch.float64), 1)
    out = (s.softmax(-1) @ heads[2]).transpose(1, 2)
    torch.testing.assert_close(got.out, out.detach())
    torch.testing.assert_close(got.lse, s.logsumexp(-1).detach())
    for a, b in zip(got.grads, torch.autograd.grad(out, leaves, dout)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "score",
    [
        oracle.Score(scale=0.7, softcap=1.5, causal=True),
        oracle.Score(window=(2, 1), alibi_slopes=torch.tensor([[0.1, 0.7], [0.3, 0.2]])),
        oracle.Score(window=(1, 0), dropout_p=0.4),
    ],
    ids=["softcap-causal", "window-alibi", "window-dropout"],
)
@pytest.mark.parametrize("Sq, Sk", [(4, 6), (6, 3)])
def test_oracle_gradients_by_finite_differences(score, Sq, Sk):
    q, k, v, dout = _inputs(2, Sq, Sk, 2, 1, 3, 2)
    if score.dropout_p:
        score = replace(score, keep=philox.keep_mask((1, 2), score.dropout_p, 2, 2, Sq, Sk))
    got = oracle.run(q, k, v, dout, score)
    h = 1e-6
    for x, grad in zip((q, k, v), got.grads):
        for index in range(0, x.numel(), 5):
            sides = []
            for step in (h, -h):
                moved = x.clone()
                moved.view(-1)[index] += step
                args = [moved if x is y else y for y in (q, k, v)]
                sides.append((oracle.run(*args, None, score).out * dout).sum())
            assert abs((sides[0] - sides[1]) / (2 * h) - grad.reshape(-1)[index]) < 1e-7


def test_rules_element_by_element():
    """Mask and bias, evaluated for one (i, j) at a time as the documentation words them."""
    Sq, Sk, L, R = 9, 12, 3, 2
    mask = oracle.visible(Sq, Sk, False, (L, R))
    bias = oracle.alibi_bias(torch.tensor([0.5, 2.0]), 1, Sq, Sk)
    for i in range(Sq):
        for j in range(Sk):
            diagonal = i + Sk - Sq
            assert bool(mask[i, j]) == (diagonal - L <= j <= diagonal + R)
            assert bias[0, 1, i, j].item() == -2.0 * abs(diagonal - j)
    assert torch.equal(oracle.visible(Sq, Sk, True, (-1, 5)), oracle.visible(Sq, Sk, False, (-1, 0)))
    assert oracle.visible(9, 4, False, (-1, 4)).all()  # a side as long as the keys is no bound, even where Sq > Sk
    assert not oracle.visible(9, 4, True, (-1, -1))[:5].any()


def test_varlen_is_dense_per_sequence():
    lengths = [(3, 5), (0, 4), (4, 0), (6, 2)]
    g = torch.Generator().manual_seed(1)
    q, dout = (torch.randn(15, 2, 4, generator=g, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(12, 1, 4, generator=g, dtype=torch.float64) for _ in range(2))
    got = oracle.run_varlen(q, k, v, dout, lengths, oracle.Score(causal=True))
    first = oracle.run(q[None, :3], k[None, :5], v[None, :5], dout[None, :3], oracle.Score(causal=True))
    assert torch.equal(got.out[:3], first.out[0]) and torch.equal(got.grads[1][:5], first.grads[1][0])
    assert got.out[3:7].eq(0).all() and got.lse[:, 3:7].eq(math.inf).all()
    assert got.out[13:].eq(0).all() and got.lse[:, 13:].eq(math.inf).all()
    assert got.grads[1][5:9].eq(0).all() and all(torch.isfinite(x).all() for x in got.grads)


def test_same_precision_reference_rounds():
    """The rounded reference differs from the exact one by about one rounding of its dtype, and not at all in fp64."""
    q, k, v, dout = _inputs(1, 8, 40, 2, 2, 16, 16)
    for dtype, least, most in [(torch.bfloat16, 1e-4, 0.1), (torch.float16, 1e-5, 0.01), (torch.float32, 1e-9, 1e-5)]:
        args = [x.to(dtype) for x in (q, k, v, dout)]
        exact = oracle.run(*args, oracle.Score())
        rounded = oracle.run(*args, oracle.Score(), oracle.same_precision(dtype))
        for a, b in zip((exact.out, *exact.grads), (rounded.out, *rounded.grads)):
            assert least < (a - b).abs().max() < most
