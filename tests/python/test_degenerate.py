"""Empty sequences, rows that see no key, rows past the last sequence: every element of every result is defined."""

from __future__ import annotations

import math
from dataclasses import replace

import cases
import harness
import pytest
import torch
from cases import Case

from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn import flash_attn_interface as interface

DEGENERATE = pytest.mark.feature(
    "zero lengths and rows without keys forward", "zero lengths and rows without keys backward"
)


def run(case):
    inputs = harness.make_inputs(case)
    out, lse, _ = harness.public_call(inputs)
    return inputs, out, lse, harness.unpack_grads(case, torch.autograd.grad(out, inputs.leaves, inputs.dout))


@DEGENERATE
@pytest.mark.second_torch
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
@pytest.mark.parametrize("pair", [(0, 0), (0, 5), (7, 0), (1, 0), (0, 1200), (1200, 0)], ids=str)
@pytest.mark.parametrize(
    "settings", [{}, {"causal": True}, {"window": (3, 2)}, {"alibi": "H"}, {"dropout_p": 0.5}], ids=str
)
def test_whole_call_without_queries_or_keys(settings, pair, varlen, dtype):
    case = Case(dtype=dtype, lengths=(pair,) * 2, varlen=varlen, H=4, Hk=2, D=16, **settings)
    _, out, lse, grads = run(case)
    assert out.eq(0).all() and lse.eq(math.inf).all()
    assert all(g.eq(0).all() for g in grads)


@DEGENERATE
@pytest.mark.second_torch
def test_strides_of_nothing_are_of_no_matter():
    """sum's gradient has strides of 0, and of a tensor without elements contiguous() keeps whatever there is."""
    ends = torch.zeros(2, dtype=torch.int32)
    keys = torch.tensor([0, 6], dtype=torch.int32)
    for shape in ((1, 0, 4, 16), (0, 4, 16)):
        q = torch.randn(shape, requires_grad=True)
        kv = torch.randn(*((1,) if len(shape) == 4 else ()), 6, 4, 16, requires_grad=True)
        call = flash_attn_func(q, kv, kv) if len(shape) == 4 else flash_attn_varlen_func(q, kv, kv, ends, keys, 0, 6)
        call.sum().backward()
        assert q.grad.shape == q.shape and kv.grad.eq(0).all()
    apart = torch.empty_strided((1, 0, 4, 16), (0, 0, 32, 2))
    assert flash_attn_func(apart, kv[None], kv[None]).shape == (1, 0, 4, 16)
    assert flash_attn_func(kv[None], apart, apart).eq(0).all()


@DEGENERATE
@pytest.mark.second_torch
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
@pytest.mark.parametrize(
    "settings",
    [
        {"causal": True},
        {"window": (4, 2)},
        {"causal": True, "window": (9, 0)},
        {"causal": True, "alibi": "BH"},
        {"causal": True, "dropout_p": 0.3},
    ],
    ids=str,
)
def test_rows_before_the_first_key(settings, varlen, dtype):
    """With Sq > Sk the first queries stand left of every key."""
    case = Case(dtype=dtype, lengths=((1100, 70),), varlen=varlen, H=2, Hk=1, D=32, **settings)
    _, out, lse, grads = run(case)
    blind = 1100 - 70 - max(settings.get("window", (0, 0))[1], 0)
    rows = out[0] if not varlen else out
    assert rows[:blind].eq(0).all() and rows[blind:].ne(0).any()
    assert lse[..., :blind].eq(math.inf).all() and torch.isfinite(lse[..., blind:]).all()
    dq = grads[0] if varlen else grads[0][0]
    assert dq[:blind].eq(0).all() and all(torch.isfinite(g).all() for g in grads)
    harness.check(case)


@DEGENERATE
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_window_that_no_query_reaches(dtype):
    """right = 0 and left = 0 with Sq far beyond Sk: only the last rows see a key, one each."""
    case = Case(dtype=dtype, lengths=((90, 5),), H=2, Hk=2, D=16, window=(0, 0))
    inputs, out, _, grads = run(case)
    eps = torch.finfo(out.dtype).eps
    assert out[0, :85].eq(0).all()
    torch.testing.assert_close(out[0, 85:], inputs.leaves[2][0], rtol=2 * eps, atol=0.0)
    torch.testing.assert_close(grads[2][0], inputs.dout[0, 85:], rtol=8 * eps, atol=0.0)
    assert grads[0].abs().max() < 1e-5


@DEGENERATE
@pytest.mark.second_torch
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("settings", [{}, {"causal": True}, {"alibi": "BH"}, {"dropout_p": 0.17}], ids=str)
def test_empty_sequences_between_others(settings, dtype):
    lengths = ((0, 0), (40, 1100), (0, 30), (33, 0), (1, 1), (0, 0), (70, 65), (5, 0))
    harness.check(Case(dtype=dtype, lengths=lengths, varlen=True, H=4, Hk=2, D=24, **settings))


@DEGENERATE
@pytest.mark.parametrize("Hk", (1, 8))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ("fp16", "bf16"))
def test_keys_without_queries(dtype, causal, Hk):
    """Contract: test_flash_attn_bwd_varlen_seqq_zero."""
    case = Case(dtype=dtype, lengths=((0, 503), (256, 265), (256, 768)), varlen=True, H=8, Hk=Hk, D=64, causal=causal)
    _, _, _, (dq, dk, dv) = run(case)
    assert all(torch.isfinite(g).all() for g in (dq, dk, dv))
    assert dk[:503].eq(0).all() and dv[:503].eq(0).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", (16, 32, 64))
def test_single_keys_with_loose_bounds(D, causal):
    """Contract: test_flash_attn_bwd_varlen_overflow."""
    lengths = ((76, 1), (34, 1), (146, 1))
    case = Case(dtype="fp16", lengths=lengths, varlen=True, H=5, Hk=5, D=D, causal=causal)
    inputs = harness.make_inputs(case)
    out = flash_attn_varlen_func(*inputs.leaves, inputs.cu_seqlens_q, inputs.cu_seqlens_k, 256, 3, causal=causal)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out, inputs.leaves, inputs.dout))


@DEGENERATE
@pytest.mark.second_torch
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_slack_rows_are_zero(dtype):
    """Rows of q, k, v past cu_seqlens[-1]: zeros in out and all gradients, +inf in the LSE, whatever they hold."""
    case = Case(dtype=dtype, lengths=((40, 70), (9, 1100)), slack=(13, 17), varlen=True, H=2, Hk=1, D=32)
    inputs = harness.make_inputs(case)
    with torch.no_grad():
        for x, used in zip(inputs.leaves, (49, 1170, 1170)):
            x[used:] = math.nan
    out, lse, _ = harness.public_call(inputs)
    dq, dk, dv = torch.autograd.grad(out, inputs.leaves, inputs.dout)
    assert out[49:].eq(0).all() and lse[:, 49:].eq(math.inf).all() and torch.isfinite(out).all()
    assert dq[49:].eq(0).all() and dk[1170:].eq(0).all() and dv[1170:].eq(0).all()
    assert all(torch.isfinite(g).all() for g in (dq, dk, dv))
    packed = flash_attn_varlen_func(
        *(x[:n] for x, n in zip(inputs.leaves, (49, 1170, 1170))), inputs.cu_seqlens_q, inputs.cu_seqlens_k, 40, 1100
    )
    assert torch.equal(packed, out[:49])


@DEGENERATE
@pytest.mark.parametrize("infinity", [math.inf, -math.inf])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_backward_takes_either_infinity_as_an_empty_row(dtype, infinity):
    """LSEs merged by other libraries mark rows without keys by -inf."""
    case = Case(dtype=dtype, lengths=((60, 40),), H=2, Hk=2, D=16)
    inputs = harness.make_inputs(case)
    q, k, v = (x.detach() for x in inputs.leaves)
    out, lse, _, _ = interface._flash_attn_forward(q, k, v, 0.0, 0.25, False, -1, -1, 0.0, None, False)
    lse[:, :, ::3] = infinity
    dq, dk, dv = (torch.full_like(x, math.nan) for x in (q, k, v))
    interface._flash_attn_backward(
        inputs.dout, q, k, v, out, lse, dq, dk, dv, 0.0, 0.25, False, -1, -1, 0.0, None, False
    )
    assert dq[:, ::3].eq(0).all() and dq[:, 1::3].ne(0).any()
    dout = inputs.dout.clone()
    dout[:, ::3] = 0
    others = [torch.empty_like(x) for x in (q, k, v)]
    lse[:, :, ::3] = 0.0
    interface._flash_attn_backward(dout, q, k, v, out, lse, *others, 0.0, 0.25, False, -1, -1, 0.0, None, False)
    tolerance = {"fp16": 1e-2, "bf16": 5e-2}.get(dtype, 1e-5)
    assert all(torch.allclose(a, b, atol=tolerance, rtol=tolerance) for a, b in zip((dk, dv), others[1:]))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
def test_hidden_keys_have_no_influence(varlen, dtype):
    """Keys that the mask hides from every query take no part: other finite values there change no bit."""
    case = Case(dtype=dtype, lengths=((20, 1100),), varlen=varlen, H=2, Hk=1, D=32, causal=True, window=(30, 0))
    first_seen = 1100 - 20 - 30
    inputs, out, lse, grads = run(case)
    with torch.no_grad():
        for x in inputs.leaves[1:]:
            (x if varlen else x[0])[:first_seen] = 6e4
    again, again_lse, _ = harness.public_call(inputs)
    again_grads = torch.autograd.grad(again, inputs.leaves, inputs.dout)
    assert torch.equal(again, out) and torch.equal(again_lse, lse)
    assert all(torch.equal(a, b) for a, b in zip(again_grads, grads))


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_one_key_returns_its_value(dtype):
    """Softmax over one key is 1: out is v, up to two roundings, and the LSE is the score."""
    q, k, v = (torch.randn(2, 5, 2, 16, dtype=harness.TORCH_DTYPES[dtype]) for _ in range(3))
    out, lse, _ = flash_attn_func(q, k[:, :1], v[:, :1], return_attn_probs=True)
    torch.testing.assert_close(out, v[:, :1].expand_as(out), rtol=2 * torch.finfo(out.dtype).eps, atol=0.0)
    score = torch.einsum("bqhd,bkhd->bhqk", q.double(), k[:, :1].double())[..., 0] / 4
    torch.testing.assert_close(lse.double(), score, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("value", [0.0, 30.0, -30.0])
def test_equal_scores(dtype, value):
    """Scores that are all alike, also large ones: the mean of v, LSE = score + log(Sk)."""
    t = harness.TORCH_DTYPES[dtype]
    q = torch.full((1, 3, 1, 8), value, dtype=t)
    k = torch.full((1, 1100, 1, 8), 30.0, dtype=t)
    v = torch.randn(1, 1100, 1, 8).to(t)
    out, lse, _ = flash_attn_func(q, k, v, softmax_scale=1.0, return_attn_probs=True)
    mean = v.double().mean(1, keepdim=True).expand(1, 3, 1, 8)
    atol = {"fp16": 1e-3, "bf16": 2e-3, "fp32": 1e-6, "fp64": 1e-12}[dtype]
    torch.testing.assert_close(out.double(), mean, rtol=0, atol=atol)
    expected = 8 * value * 30.0 + math.log(1100)
    torch.testing.assert_close(lse.double(), torch.full_like(lse, expected, dtype=torch.float64), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("score", [1e4, -1e4, 8e4])
def test_huge_scores_stay_finite(score):
    """exp of the scores themselves would overflow or vanish."""
    q = torch.full((1, 70, 1, 8), 1.0)
    k = torch.full((1, 1100, 1, 8), score / 8)
    k[:, 700] *= 1.5
    leaves = [x.requires_grad_() for x in (q, k, torch.randn(1, 1100, 1, 8))]
    out, lse, _ = flash_attn_func(*leaves, softmax_scale=1.0, return_attn_probs=True)
    grads = torch.autograd.grad(out, leaves, torch.randn_like(out))
    assert all(torch.isfinite(x).all() for x in (out, lse, *grads))
    if score > 0:
        assert torch.allclose(out[0], leaves[2][0, 700].expand_as(out[0]))


def test_a_single_element():
    case = Case(lengths=((1, 1),), H=1, Hk=1, D=1)
    for dtype in cases.DTYPES:
        harness.check(replace(case, dtype=dtype))


@DEGENERATE
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(
    "settings", [{"causal": True}, {"window_size": (5, 2)}, {"causal": True, "dropout_p": 0.5}], ids=str
)
@pytest.mark.parametrize("Sq, Sk", [(700, 300), (70, 3)])
def test_nothing_is_left_of_the_call_before(Sq, Sk, settings, dtype):
    """Memory is used again: a row that sees no key must not show what the last call had there."""
    dtype = harness.TORCH_DTYPES[dtype]
    q, k, v = (torch.randn(1, n, 2, 64).to(dtype) for n in (Sq, Sk, Sk))
    bad = torch.full((1, 700, 2, 64), math.nan).to(dtype)
    assert flash_attn_func(torch.randn(1, 1024, 2, 64).to(dtype), bad, bad).isnan().all()
    out = flash_attn_func(q, k, v, **settings)
    assert out.isfinite().all() and out[:, : Sq - Sk - 3].eq(0).all()
