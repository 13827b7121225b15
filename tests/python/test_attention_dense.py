"""Dense attention: head dims, lengths, and every feature alone, against the oracle."""

from __future__ import annotations

import cases
import harness
import pytest
import tolerances
import torch
from cases import Case

from flash_attn import flash_attn_func


@pytest.mark.parametrize("case", [c.param() for c in cases.head_dim_cases(varlen=False)])
def test_head_dims(case):
    harness.check(case)


@pytest.mark.parametrize("case", [c.param() for c in cases.length_cases()])
def test_lengths(case):
    harness.check(case)


@pytest.mark.parametrize("case", [c.param() for c in cases.lone_feature_cases() if not c.varlen])
def test_one_feature(case):
    harness.check(case)


@pytest.mark.second_torch
@pytest.mark.parametrize("case", [c.param() for c in cases.lone_feature_cases(short=True) if not c.varlen])
def test_one_feature_of_short_sequences(case):
    harness.check(case)


# More rows per key head than meet keys together, of heads with few queries: blocks of heads, the last one smaller.
GROUPS = {
    "one query": dict(lengths=((1, 1200),) * 2, H=72, Hk=1),
    "two key heads": dict(lengths=((2, 300),), H=130, Hk=2, causal=True, alibi="BH", sink=True),
    "a window": dict(lengths=((11, 1100),), H=16, Hk=2, window=(700, 3), softcap=15.0),
    "a bias": dict(lengths=((3, 130),) * 2, H=44, Hk=2, bias="BHQ", mask="4-D"),
    "bounds of heads": dict(lengths=((5, 1100),), H=39, Hk=3, bounds="heads", dropout_p=0.2),
    "latent attention": dict(lengths=((1, 200),), H=128, Hk=1, D=576, Dv=512),
    "varlen": dict(lengths=((1, 1100), (20, 300), (0, 5), (4, 64), (3, 0)), H=30, Hk=1, varlen=True, mask="heads"),
}


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("group", list(GROUPS))
def test_heads_that_share_a_key_head(group, dtype):
    harness.check(Case(**{"D": 64, **GROUPS[group]}, dtype=dtype))


@pytest.mark.slow
@pytest.mark.parametrize("mask", list(cases.MASKS))
@pytest.mark.parametrize("pair", cases.PAIRS, ids=str)
def test_full_product(pair, mask):
    """Every dtype and head dim at this pair.

    fp32 and fp64 get twice the multiples here: with three keys there is little averaging, and E_pt is that of torch's
    vectorised dot product, while a tiled kernel sums D products one after the other.
    """
    for case in cases.full_cases(pair, mask):
        harness.check(case, slack=2.0 if case.dtype in ("fp32", "fp64") else 1.0)


@pytest.mark.parametrize("D", (16, 32, 64))
@pytest.mark.parametrize("S", (1, 2, 5, 17, 128))
@pytest.mark.parametrize("dtype", ("fp16", "bf16"))
def test_large_inputs(dtype, S, D):
    """Scores in the hundreds: the softmax is close to one-hot. Contract: test_flash_attn_bwd_overflow."""
    case = Case(dtype=dtype, lengths=((S, S),) * 8, H=5, Hk=5, D=D, causal=True)
    inputs = harness.make_inputs(case)
    with torch.no_grad():
        for leaf, plain, factor in zip(inputs.leaves, (inputs.q, inputs.k, inputs.v), (5, 3, 3)):
            leaf *= factor
            plain.copy_(leaf)
    out, _, _ = harness.public_call(inputs)
    grads = torch.autograd.grad(out, inputs.leaves, inputs.dout)
    ref, pt = (harness.reference(inputs, None, a) for a in harness.arithmetics(case))
    tolerances.assert_within("out", out, ref.out, pt.out, 2, 0.0, case.id)
    for name, *three in zip(("dq", "dk", "dv"), grads, ref.grads, pt.grads):
        tolerances.assert_within(name, *three, 5, 1e-3, case.id)


@pytest.mark.parametrize("D", (40, 64, 128))
@pytest.mark.parametrize("pair", [(1, 239), (239, 1), (3, 1024), (1024, 3), (1, 2048), (1023, 1024)])
@pytest.mark.parametrize("window", [(-1, -1), (64, 0)])
@pytest.mark.parametrize("dtype", ("fp16", "bf16"))
def test_causal_swapped(dtype, window, pair, D):
    """The contract's causal test, which alone has an additive 1e-5."""
    case = Case(dtype=dtype, lengths=(pair,), H=3, Hk=3, D=D, causal=True, window=window)
    inputs = harness.make_inputs(case)
    out, _, _ = harness.public_call(inputs)
    grads = torch.autograd.grad(out, inputs.leaves, inputs.dout)
    ref, pt = (harness.reference(inputs, None, a) for a in harness.arithmetics(case))
    for name, *three in zip(("out", "dq", "dk", "dv"), (out, *grads), (ref.out, *ref.grads), (pt.out, *pt.grads)):
        tolerances.assert_within(name, *three, 2, 1e-5, case.id)


def test_unbounded_window():
    """-1, any other negative number, and None for an item or for both."""
    q, k, v = (torch.randn(1, 40, 2, 16) for _ in range(3))
    expected = flash_attn_func(q, k, v)
    for window in [(-1, -1), (-7, -2), (None, None), (None, -1), None, (40, 40)]:
        assert torch.equal(flash_attn_func(q, k, v, window_size=window), expected)


def test_softmax_scale_signs():
    """Zero gives the mean of v; a negative scale is an ordinary number."""
    q, k, v = (torch.randn(1, 50, 2, 16) for _ in range(3))
    mean = flash_attn_func(q, k, v, softmax_scale=0.0)
    torch.testing.assert_close(mean, v.mean(1, keepdim=True).expand_as(v), rtol=1e-5, atol=1e-6)
    flipped = flash_attn_func(q, k, v, softmax_scale=-0.3)
    torch.testing.assert_close(flipped, flash_attn_func(-q, k, v, softmax_scale=0.3))


@pytest.mark.parametrize(
    "window", [torch.tensor([3, 5]), [3, 5], (torch.tensor(3), 5), (3, 5)], ids=["tensor", "list", "0-d", "tuple"]
)
def test_window_size_is_any_pair(window):
    q, k, v = (torch.randn(1, 40, 2, 16) for _ in range(3))
    expected = flash_attn_func(q, k, v, window_size=(3, 5))
    assert torch.equal(flash_attn_func(q, k, v, window_size=window), expected)


@pytest.mark.parametrize(
    "same", [((-1, 0), True), ((-5, 0), True), ((-1, 3), True), ((90, 0), True), ((-1, 0), False)], ids=str
)
def test_spellings_of_causal(same):
    """causal forces the right side to 0; negative sides, and sides as long as the keys, are unbounded."""
    window, causal = same
    q, k, v = torch.randn(1, 40, 2, 16), torch.randn(1, 90, 2, 16), torch.randn(1, 90, 2, 16)
    expected = flash_attn_func(q, k, v, causal=True)
    assert torch.equal(flash_attn_func(q, k, v, causal=causal, window_size=window), expected)


def test_same_row_in_any_batch():
    """A sequence's result does not depend on what it is batched with."""
    q, k, v = torch.randn(3, 70, 4, 32), torch.randn(3, 1100, 2, 32), torch.randn(3, 1100, 2, 32)
    whole = flash_attn_func(q, k, v, causal=True)
    for b in range(3):
        one = flash_attn_func(q[b : b + 1], k[b : b + 1], v[b : b + 1], causal=True)
        assert torch.equal(one[0], whole[b])
