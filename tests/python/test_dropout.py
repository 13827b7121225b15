"""Dropout: the mask is the documented function of (seed, offset, b, h, i, j), in forward and backward alike."""

from __future__ import annotations

import math
from dataclasses import replace

import cases
import harness
import oracle
import philox
import pytest
import tolerances
import torch
from cases import Case

import flash_attn_2_cuda
from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn import flash_attn_interface as interface

DENSE = Case(lengths=((150, 1100),) * 2, H=3, Hk=1, D=32, dropout_p=0.17)
VARLEN = Case(lengths=((67, 1100), (0, 3), (130, 513)), varlen=True, H=2, Hk=2, D=32, dropout_p=0.17)


def raw_forward(inputs, p, return_softmax=True):
    """(out, softmax_lse, S_dmask, rng_state) of the raw function, which returns the state it drew."""
    case = inputs.case
    q, k, v = (x.detach() for x in inputs.leaves)
    common = (p, case.D**-0.5, case.causal, *case.window)
    if case.varlen:
        cu = (inputs.cu_seqlens_q, inputs.cu_seqlens_k, *inputs.max_seqlens)
        return interface._flash_attn_varlen_forward(q, k, v, *cu, *common, 0.0, inputs.alibi_slopes, return_softmax)
    return interface._flash_attn_forward(q, k, v, *common, 0.0, inputs.alibi_slopes, return_softmax)


@pytest.mark.second_torch
@pytest.mark.parametrize("p", (0.01, 0.17, 0.5, 0.9, 0.999))
@pytest.mark.parametrize("case", [DENSE, VARLEN], ids=["dense", "varlen"])
def test_mask_is_rebuilt_from_rng_state(case, p, rng):
    inputs = harness.make_inputs(case)
    _, _, s_dmask, rng_state = raw_forward(inputs, p)
    assert rng_state.dtype == torch.int64 and rng_state.shape == (2,)
    keep = philox.keep_mask(rng_state.tolist(), p, *s_dmask.shape)
    harness.check_s_dmask(inputs, s_dmask, keep)


@pytest.mark.second_torch
@pytest.mark.parametrize(
    "rng_state", [(0, 0), (1, 0), (0, 1), (-1, -1), (2**63 - 1, -(2**63)), (2**32, 2**40 + 5)], ids=str
)
def test_every_bit_of_rng_state_counts(rng_state):
    """Seeds and offsets at the edges of int64, through the backward: dv is P_drop^T dout."""
    case = replace(DENSE, lengths=((20, 150),), dropout_p=0.5)
    inputs = harness.make_inputs(case)
    q, k, v = (x.detach() for x in inputs.leaves)
    keep = harness.rebuilt_mask(case, rng_state)
    ref, pt = (harness.reference(inputs, keep, a) for a in harness.arithmetics(case))
    dq, dk, dv = (torch.full_like(x, math.nan) for x in (q, k, v))
    interface._flash_attn_backward(
        inputs.dout,
        q,
        k,
        v,
        ref.out.float(),
        ref.lse.float(),
        dq,
        dk,
        dv,
        0.5,
        case.D**-0.5,
        False,
        -1,
        -1,
        0.0,
        None,
        False,
        torch.tensor(rng_state),
    )
    for name, *three in zip(("dq", "dk", "dv"), (dq, dk, dv), ref.grads, pt.grads):
        tolerances.assert_within(name, *three, 3, 1e-6, str(rng_state))


@pytest.mark.feature("S_dmask")
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("settings", [{}, {"causal": True}, {"window": (40, 30)}, {"alibi": "H"}], ids=str)
@pytest.mark.parametrize("case", [DENSE, VARLEN], ids=["dense", "varlen"])
def test_s_dmask_normalises_to_softmax(case, settings, dtype, rng):
    """|S_dmask| is exp(score - row maximum): divided by its row sum, the softmax; hidden keys hold 0."""
    case = replace(case, dtype=dtype, **settings)
    inputs = harness.make_inputs(case)
    _, lse, s_dmask, _ = raw_forward(inputs, 0.17)
    weights = s_dmask.abs().double()
    q0 = k0 = 0
    for b, (Sq, Sk) in enumerate(case.lengths):
        got = weights[b, :, :Sq, :Sk]
        seen = oracle.visible(Sq, Sk, case.causal, case.window, max(k for _, k in case.lengths))
        assert got[:, ~seen].eq(0).all() and weights[b, :, Sq:].eq(0).all() and weights[b, :, :, Sk:].eq(0).all()
        part = (
            [inputs.q[q0 : q0 + Sq], inputs.k[k0 : k0 + Sk], inputs.v[k0 : k0 + Sk]]
            if case.varlen
            else [x[b] for x in (inputs.q, inputs.k, inputs.v)]
        )
        ref, pt = (
            oracle.run(*(x[None] for x in part), None, harness.score_of(inputs), a) for a in harness.arithmetics(case)
        )
        rows = seen.any(-1)
        if rows.any():
            assert torch.allclose(got[:, rows].amax(-1), torch.ones((), dtype=torch.float64), rtol=0, atol=1e-6)
            softmax = got[:, rows] / got[:, rows].sum(-1, keepdim=True)
            tolerances.assert_within("S_dmask", softmax, ref.probs[0][:, rows], pt.probs[0][:, rows], 2, 0.0, case.id)
        q0, k0 = q0 + Sq, k0 + Sk


@pytest.mark.parametrize("dtype, error", [("fp32", 1e-5), ("fp16", 4e-4), ("bf16", 3e-3)])
def test_s_dmask_counts_a_sink_as_a_score(dtype, error, isa):
    """The largest of a row, of which every instruction set takes its weights: here the sink, then a key's score."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 70, 2, 32, generator=g).to(harness.TORCH_DTYPES[dtype]) for _ in range(3))
    sink = torch.tensor([6.0, -6.0])
    s_dmask = flash_attn_func(q, k, v, dropout_p=0.3, learnable_sink=sink, return_attn_probs=True)[2]
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * 32**-0.5
    top = torch.maximum(scores.amax(-1, keepdim=True), sink.double()[:, None, None])
    torch.testing.assert_close(s_dmask.double().abs(), (scores - top).exp(), rtol=0, atol=error)


@pytest.mark.parametrize("p", (0.1, 0.17, 0.5, 0.8))
def test_fraction_kept(p, rng):
    """Within four standard deviations of (floor(255 (1 - p)) + 1) / 256, which is within 1/256 of 1 - p."""
    q = torch.randn(2, 128, 4, 8)
    s_dmask = flash_attn_func(q, q, q, dropout_p=p, return_attn_probs=True)[2]
    fraction = 1.0 - torch.signbit(s_dmask).double().mean().item()
    expected = philox.keep_probability(p)
    assert abs(expected - (1 - p)) <= 1 / 256
    assert abs(fraction - expected) < 4 * math.sqrt(expected * (1 - expected) / s_dmask.numel())


def test_mean_over_seeds_is_the_output_without_dropout(rng):
    """Scaling by 1 / (1 - p) keeps the expectation, but for the rounding of p to 256ths."""
    q, k, v = torch.randn(1, 4, 2, 16), torch.randn(1, 60, 2, 16), torch.rand(1, 60, 2, 16)
    mean = torch.stack([flash_attn_func(q, k, v, dropout_p=0.25) for _ in range(3000)]).mean(0)
    expected = flash_attn_func(q, k, v) * philox.keep_probability(0.25) / 0.75
    assert (mean - expected).abs().max() < 0.01


@pytest.mark.second_torch
@pytest.mark.parametrize("case", [DENSE, VARLEN], ids=["dense", "varlen"])
def test_manual_seed_reproduces(case):
    inputs = harness.make_inputs(case)

    def run(seed):
        torch.manual_seed(seed)
        out, lse, s_dmask = harness.public_call(inputs)
        return [out, lse, s_dmask, *torch.autograd.grad(out, inputs.leaves, inputs.dout)]

    first, again, other = run(5), run(5), run(6)
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert torch.equal(first[1], other[1])  # the LSE knows nothing of dropout
    assert not any(torch.equal(a, b) for a, b in zip(first[:1] + first[2:], other[:1] + other[2:]))


def test_calls_heads_and_sequences_get_masks_of_their_own(rng):
    q = torch.zeros(3, 64, 4, 8)
    masks = [torch.signbit(flash_attn_func(q, q, q, dropout_p=0.5, return_attn_probs=True)[2]) for _ in range(2)]
    flat = torch.cat([m.flatten(0, 1) for m in masks]).flatten(1).double()
    correlation = torch.corrcoef(flat) - torch.eye(len(flat))
    assert correlation.abs().max() < 0.08  # 4096 elements: five standard deviations


def test_mask_does_not_depend_on_anything_else(rng):
    """dtype, head dim, values, mask and packing leave the random numbers of (b, h, i, j) alone."""
    kept = []
    for dtype, D, causal in [(torch.float32, 8, False), (torch.bfloat16, 100, False), (torch.float64, 576, True)]:
        q = torch.randn(2, 70, 2, D, dtype=dtype)
        torch.manual_seed(3)
        kept.append(torch.signbit(flash_attn_func(q, q, q, dropout_p=0.4, causal=causal, return_attn_probs=True)[2]))
    q = torch.randn(140, 2, 16)
    cu = torch.tensor([0, 70, 140], dtype=torch.int32)
    torch.manual_seed(3)
    kept.append(
        torch.signbit(flash_attn_varlen_func(q, q, q, cu, cu, 70, 70, dropout_p=0.4, return_attn_probs=True)[2])
    )
    below = torch.ones(70, 70, dtype=torch.bool).tril()
    assert all(torch.equal(kept[0][..., below], other[..., below]) for other in kept[1:])
    assert torch.equal(kept[0], kept[1]) and torch.equal(kept[0], kept[3])


def test_no_dropout_draws_nothing():
    q = torch.randn(1, 8, 2, 16)
    before = torch.get_rng_state()
    flash_attn_func(q, q, q)
    _, _, s_dmask, rng_state = interface._flash_attn_forward(q, q, q, 0.0, 0.25, False, -1, -1, 0.0, None, False)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(rng_state, torch.zeros(2, dtype=torch.int64)) and s_dmask.shape == (0,)


REFUSED = {
    "k is too short": lambda q, k: dict(v=k[:, :-1]),
    "heads do not divide": lambda q, k: dict(k=k[:, :, :3], v=k[:, :, :3]),
    "dtype": lambda q, k: dict(v=k.double()),
    "ranks": lambda q, k: dict(q=q[0]),
    "dropout_p": lambda q, k: dict(dropout_p=1.5),
    "softcap": lambda q, k: dict(softcap=2.0),
    "slopes": lambda q, k: dict(alibi_slopes=torch.ones(3)),
    "columns and a mask": lambda q, k: dict(
        q=q.transpose(1, 3).contiguous().transpose(1, 3), attn_mask=torch.ones(2, 9, dtype=torch.bool)
    ),
}


@pytest.mark.second_torch
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED.keys())
def test_refused_calls_draw_nothing(change, requires_grad):
    q, k = torch.randn(2, 8, 4, 16).requires_grad_(requires_grad), torch.randn(2, 8, 4, 16)
    before = torch.get_rng_state()
    with pytest.raises((RuntimeError, NotImplementedError)):
        flash_attn_func(**{**dict(q=q, k=k, v=k, dropout_p=0.1), **change(q, k)})
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("function", ["fwd", "_flash_attn_forward"])
def test_refused_raw_calls_draw_nothing(function):
    q, k = torch.randn(2, 8, 4, 16), torch.randn(2, 8, 3, 16)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="heads"):
        if function == "fwd":
            flash_attn_2_cuda.fwd(q, k, k, None, None, 0.1, 0.25, False, -1, -1, 0.0, False, None)
        else:
            interface._flash_attn_forward(q, k, k, 0.1, 0.25, False, -1, -1, 0.0, None, False)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.second_torch
@pytest.mark.parametrize("requires_grad", [False, True])
def test_columns_as_rows_take_dropout(requires_grad, rng):
    """Tensors whose rows are not contiguous draw and compute what contiguous ones do."""
    qkv = [torch.randn(2, 4, 16, 8).transpose(1, 3).requires_grad_(requires_grad) for _ in range(3)]
    rows = [x.detach().contiguous().requires_grad_(requires_grad) for x in qkv]
    torch.manual_seed(5)
    expected = flash_attn_func(*rows, dropout_p=0.3)
    torch.manual_seed(5)
    assert torch.equal(flash_attn_func(*qkv, dropout_p=0.3), expected)


def test_backward_ignores_later_seeds(rng):
    inputs = harness.make_inputs(replace(DENSE, lengths=((40, 90),)))
    out, _, _ = harness.public_call(inputs)
    first = torch.autograd.grad(out, inputs.leaves, inputs.dout, retain_graph=True)
    torch.manual_seed(99)
    harness.public_call(inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(out, inputs.leaves, inputs.dout)))
