"""Packed batches of sequences: head dims, every feature alone, and agreement with dense calls."""

from __future__ import annotations

import cases
import harness
import pytest
import same_bits
import torch
from cases import Case

from flash_attn import flash_attn_varlen_func


@pytest.mark.parametrize("case", [c.param() for c in cases.head_dim_cases(varlen=True)])
def test_head_dims(case):
    harness.check(case)


@pytest.mark.parametrize("case", [c.param() for c in cases.lone_feature_cases() if c.varlen])
def test_one_feature(case):
    harness.check(case)


@pytest.mark.second_torch
@pytest.mark.parametrize("case", [c.param() for c in cases.lone_feature_cases(short=True) if c.varlen])
def test_one_feature_of_short_sequences(case):
    harness.check(case)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("settings", [{"causal": True}, {"window": (40, 9)}, {"alibi": "BH"}], ids=str)
def test_equals_dense_per_sequence(dtype, settings):
    case = Case(dtype=dtype, lengths=((70, 1100), (5, 1), (130, 130)), varlen=True, H=4, Hk=2, D=32, **settings)
    same_bits.check_equals_dense_per_sequence(case)


@pytest.mark.parametrize("more", [0, 1, 700])
def test_max_seqlen_is_an_upper_bound(more):
    """Larger bounds than the longest sequence change nothing, dropout included."""
    case = Case(lengths=((70, 1100), (9, 30)), varlen=True, D=32, dropout_p=0.3, causal=True)
    inputs = harness.make_inputs(case)
    results = []
    for extra in (0, more):
        torch.manual_seed(1)
        out, lse, mask = flash_attn_varlen_func(
            *inputs.leaves,
            inputs.cu_seqlens_q,
            inputs.cu_seqlens_k,
            70 + extra,
            1100 + extra,
            dropout_p=0.3,
            causal=True,
            return_attn_probs=True,
        )
        assert mask.shape == (2, 2, 70 + extra, 1100 + extra)
        results.append((out, lse, *torch.autograd.grad(out, inputs.leaves, inputs.dout)))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_window_is_unbounded_from_max_seqlen_k_on():
    """Upstream compares the window with max_seqlen_k, not with each sequence's own length."""
    case = Case(lengths=((30, 4), (8, 20)), varlen=True, D=16, window=(-1, 5))
    harness.check(case)
    inputs = harness.make_inputs(case)
    cu = (inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    bounded = flash_attn_varlen_func(*inputs.leaves, *cu, 30, 20, window_size=(-1, 5))
    unbounded = flash_attn_varlen_func(*inputs.leaves, *cu, 30, 20, window_size=(-1, 20))
    full = flash_attn_varlen_func(*inputs.leaves, *cu, 30, 20)
    assert torch.equal(unbounded, full) and not torch.equal(bounded, full)


def test_long_batch_of_short_sequences():
    case = Case(lengths=tuple((n % 4, n % 5) for n in range(300)), varlen=True, D=16, H=2, Hk=1, causal=True)
    harness.check(case)
