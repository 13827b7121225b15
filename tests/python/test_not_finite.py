"""NaN in the inputs: it reaches every result that depends on it, and no other head or sequence.

Whoever looks for the step at which a run diverged, or for a mask that came out as 0 * inf, has nothing else to go by. A
kernel can lose a NaN wherever it takes a maximum, clamps the argument of exp2 or looks a table up: `vmaxps` returns its
second operand, a conversion to an integer any number.

Rows of queries that do not see a key may still meet its NaN in V or, backward, in K, as 0 * NaN of a tile at the edge
of a mask: so it is with upstream's kernels and torch.

Finite inputs give none, up to scores as large as the README promises.
"""

from __future__ import annotations

import itertools
import math

import harness
import pytest
import torch
from devices import CPU, OTHERS, SIMULATED, Device, needs_code
from not_finite import MASKS, Call, features_of_a_gpu

from flash_attn import flash_attn_func, flash_attn_varlen_func

# (Sq, Sk, H, Hk): rows of a cache where they are, strips and queries in the lanes, several blocks of keys.
SHAPES = ((1, 300, 4, 1), (9, 150, 4, 2), (70, 140, 4, 2), (150, 650, 2, 2))


def pytest_generate_tests(metafunc):
    if "gpu" in metafunc.fixturenames:
        simulated = metafunc.config.getoption("device") == "simulated"
        metafunc.parametrize("gpu", SIMULATED if simulated else ["cuda"])


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "fp64"])
def test_nan_reaches_what_depends_on_it(dtype, where, isa):
    for shape, mask, D in itertools.product(SHAPES, MASKS.values(), (40, 128)):
        Call(shape, D, harness.TORCH_DTYPES[dtype], mask, where).check()


@pytest.mark.parametrize("where", ["q", "k"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_and_score_features_do_not_hide_it(dtype, where, isa):
    for shape, mask in itertools.product(SHAPES[1:3], MASKS.values()):
        call = Call(shape, 64, harness.TORCH_DTYPES[dtype], mask, where)
        Sq, Sk, H, _ = shape
        for options in (
            *features_of_a_gpu(H),
            {"learnable_sink": torch.zeros(H)},
            {"attn_bias": torch.zeros(1, H, Sq, Sk)},
            {"attn_mask": torch.ones(2, 1, 1, Sk, dtype=torch.bool)},
        ):
            call.check(**options)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_nan_of_a_bias_reaches_its_row(dtype, isa):
    for shape, mask in itertools.product(SHAPES, MASKS.values()):
        call = Call(shape, 64, harness.TORCH_DTYPES[dtype], mask, "bias")
        Sq, Sk, H, _ = shape
        bias = torch.zeros(2, H, Sq, Sk)
        row = int(call.rows.nonzero()[0])
        bias[0, 0, row, call.place] = math.nan
        finite = {name: torch.isfinite(x).all(-1) for name, x in call.results(CPU, attn_bias=bias).items()}
        for name in ("out", "lse", "dq"):
            expected = torch.ones_like(finite[name])
            expected[0, row, 0] = False
            assert torch.equal(finite[name], expected), (name, call)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_nan_of_a_sink_reaches_its_head(dtype, isa):
    for shape in SHAPES:
        Sq, Sk, H, Hk = shape
        sink = torch.zeros(H)
        sink[H - 1] = math.nan
        g = torch.Generator().manual_seed(0)
        leaves = [torch.randn(2, rows, heads, 64, generator=g) for rows, heads in ((Sq, H), (Sk, Hk), (Sk, Hk))]
        leaves = [x.to(harness.TORCH_DTYPES[dtype]).requires_grad_() for x in leaves]
        out, lse, _ = flash_attn_func(*leaves, learnable_sink=sink, return_attn_probs=True)
        (dq,) = torch.autograd.grad(out, leaves[:1], torch.ones_like(out))
        for x in (out, lse[..., None].transpose(1, 2), dq):
            finite = torch.isfinite(x).all(-1)
            assert finite[:, :, : H - 1].all() and not finite[:, :, H - 1].any(), shape


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_packed_sequences_do_not_meet(dtype, isa):
    """A sequence of nothing but NaN between two others."""
    for lengths, Hk, mask, D in itertools.product(
        ((33, 70, 20), (150, 130, 60), (1, 9, 1)), (4, 1), MASKS.values(), (40, 128)
    ):
        g = torch.Generator().manual_seed(0)
        ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        leaves = [torch.randn(sum(lengths), heads, D, generator=g) for heads in (4, Hk, Hk)]
        middle = torch.zeros(sum(lengths), dtype=torch.bool)
        middle[ends[1] : ends[2]] = True
        for x in leaves:
            x[middle] = math.nan
        leaves = [x.to(harness.TORCH_DTYPES[dtype]).requires_grad_() for x in leaves]
        out = flash_attn_varlen_func(*leaves, ends, ends, max(lengths), max(lengths), **mask)
        for x in (out, *torch.autograd.grad(out, leaves, torch.ones_like(out))):
            finite = torch.isfinite(x).all(-1)
            assert finite[~middle].all() and not finite[middle].any(), (lengths, Hk, mask, D)


def large_scores(dtype, D, device=CPU):
    """The greatest scores are up to 5e7 and belong to one key each, whose value is the output."""
    g = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 70, 2, D, generator=g)
    keys = (math.sqrt(4e7 / D**0.5) * keys / keys.norm(dim=-1, keepdim=True) * D**0.5).to(dtype)
    leaves = [
        x.to(device.torch_name).requires_grad_() for x in (keys, keys, torch.randn(keys.shape, generator=g).to(dtype))
    ]
    with device.scope():
        out, lse, _ = flash_attn_func(*leaves, return_attn_probs=True)
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert 3e7 < lse.min() and lse.max() < 5e7, "the scores meant"
    assert all(torch.isfinite(x).all() for x in grads)
    torch.testing.assert_close(out, leaves[2].detach(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_scores_as_large_as_promised(dtype, isa):
    for D in (64, 128):
        large_scores(harness.TORCH_DTYPES[dtype], D)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_scores_as_large_as_promised_on_a_gpu(dtype, gpu):
    large_scores(harness.TORCH_DTYPES[dtype], 64, Device(gpu))


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_on_a_gpu_too(dtype, where, gpu):
    dtype, device = harness.TORCH_DTYPES[dtype], Device(gpu)
    Call((70, 140, 4, 2), 64, dtype, MASKS["causal"], where).check(device)
    Call((1, 300, 4, 1), 64, dtype, MASKS["full"], where).check(device)
    Call((9, 150, 4, 2), 64, dtype, MASKS["window"], where).check_on_a_gpu(device)


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize("target", OTHERS)
def test_on_other_gpus_too(target):
    needs_code(target)
    Call((70, 140, 4, 2), 64, torch.bfloat16, MASKS["causal"], "k").check(Device(target))
